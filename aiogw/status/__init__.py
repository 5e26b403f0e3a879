"""The live view: what the gateway does at this moment, as a document, a page, and in a terminal.

Nothing here decides anything about a request, and nothing that a prompt or an answer says ever comes here.
"""
