"""What a command does to a store: plan, extract, add, recode, repair, audit, and the dataset card.

Each job can be killed and started again. How text becomes tokens lives in ``chats``, how tokens become activations in
``forwards``.
"""
