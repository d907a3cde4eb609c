"""The ``stemkv`` command: one file for each verb."""
