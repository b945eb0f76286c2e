"""Capture: from the worker's feature rows to one record over HTTP.

worker --tap--> slot (shared memory) --session--> record stream to the client

slots    a bounded pool of shared-memory files, owned by the HTTP process
tap      scheduler side: copies committed rows of captured requests into their slots
session  HTTP side: one capture from request to record
"""
