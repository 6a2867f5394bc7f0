"""The whole idea on one small machine: chats, a tiny target, a store, a drafter and a report."""
