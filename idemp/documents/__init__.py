"""Documents that handlers change: `Documents`, with `idemp.documents.couchdb` and `idemp.documents.dynamodb`."""

from idemp.documents.documents import Changed, Document, DocumentDatabase, Documents, Stored, Written

__all__ = ["Changed", "Document", "DocumentDatabase", "Documents", "Stored", "Written"]
