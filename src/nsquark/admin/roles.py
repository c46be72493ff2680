"""Knows who may do what: three roles, and the role that each change needs."""

from enum import IntEnum
from typing import Final, NamedTuple, Self


class Role(IntEnum):
    """The role of a user; each may do all that those below it may."""

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
    """Says who asks. The name is empty where nobody has to say who they are."""

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
"""An operator changes what can be changed back; what takes messages away for good is for admins. The words are those of
NSQ's notifications, and ours for what NSQ does not have.
"""
