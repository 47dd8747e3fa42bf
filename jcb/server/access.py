"""Who may call a route."""

import enum


class Access(enum.Enum):
    """PUBLIC: anybody. USER: who has a key, where there are keys. ADMIN: who may change the server."""

    PUBLIC = "public"
    USER = "user"
    ADMIN = "admin"
