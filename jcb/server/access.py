"""Who may call a route."""

import enum


class Access(enum.Enum):
    """PUBLIC: anybody. USER: who has a key, where there are keys. WATCHER: a user that shares the server with no other
    key, or an admin: what it shows tells of everybody's requests. ADMIN: who may change the server.
    """

    PUBLIC = "public"
    USER = "user"
    WATCHER = "watcher"
    ADMIN = "admin"
