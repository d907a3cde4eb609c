"""The errors stemkv raises, as one small tree.

    StemKVError
    ├── ConfigError            a setting is unknown, malformed or contradictory
    ├── StoreError             a store cannot be opened
    │   └── StoreFormatError   ... because a newer stemkv wrote it
    ├── ModelError             a model cannot be found or loaded
    │   └── UnsupportedModelError   ... because stemkv cannot cache one of its layers
    └── RequestError           a request cannot be served as asked (the caller's to mend)

They are raised only where a person is waiting for an answer: at start-up, in the CLI, for a bad request.
On the read and write path of the cache nothing is raised: every fault there is a miss (see misses.py).
"""


class StemKVError(Exception):
    """Base of every error that stemkv raises; its text is one sentence naming the value and the remedy."""


class ConfigError(StemKVError):
    """A setting is unknown, malformed or contradicts another one."""


class StoreError(StemKVError):
    """A store cannot be opened."""


class StoreFormatError(StoreError):
    """The store was written by a newer stemkv than this one."""


class ModelError(StemKVError):
    """A model cannot be found or loaded."""


class UnsupportedModelError(ModelError):
    """A model keeps a state that stemkv does not know how to store; the message names the class."""


class RequestError(StemKVError):
    """A request cannot be served as asked, for example a prompt longer than the model's context."""
