"""Several workers on one store: what one of them does, and what directs them, on one machine or with Ray.

Which parts are done is told by the store's commits alone. Plans are made in ``pipeline/jobs``.
"""
