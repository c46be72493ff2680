"""Defines three roles, and the role that each change needs."""

from enum import IntEnum
from typing import Final, NamedTuple, Self


class Role(IntEnum):
    """Ranks users: each role may do everything that the roles below it may."""

    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3

    @property
    def word(self) -> str:
        return self.name.lower()

    @classmethod
    def parse(cls, word: str) -> Self:
        for role in cls:
            if role.word == word:
                return role
        raise ValueError(f"there is no role {word!r}: viewer, operator or admin")


class Identity(NamedTuple):
    """Says who makes a request. The name is empty if nothing names the user."""

    name: str
    role: Role

    def may(self, action: str) -> bool:
        return self.role >= ROLE_NEEDED[action]


ROLE_NEEDED: Final = {
    "create_topic": Role.OPERATOR,
    "create_channel": Role.OPERATOR,
    "pause_topic": Role.OPERATOR,
    "unpause_topic": Role.OPERATOR,
    "pause_channel": Role.OPERATOR,
    "unpause_channel": Role.OPERATOR,
    "publish": Role.OPERATOR,
    "republish": Role.OPERATOR,
    "seek": Role.OPERATOR,
    "empty_topic": Role.ADMIN,
    "empty_channel": Role.ADMIN,
    "delete_topic": Role.ADMIN,
    "delete_channel": Role.ADMIN,
    "tombstone_topic_producer": Role.ADMIN,
    "config": Role.ADMIN,
}
"""An operator may make changes that can be undone; those that remove messages for good are for admins. The names are
those of NSQ's notifications, or our own where NSQ has none.
"""
