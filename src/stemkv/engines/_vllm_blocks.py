"""Block tables of running requests, for a vLLM whose scheduler does not offer them (``kv_connector_block_state``)."""

from __future__ import annotations

from typing import Any

BlockIds = tuple[list[int], ...]


class BlockTables:
    """What each step adds to the tables. Ids of blocks that a window has dropped stay in them."""

    def __init__(self) -> None:
        self._tables: dict[str, BlockIds] = {}

    def of(self, output: Any, name: str) -> BlockIds | None:
        """The blocks of a request in each group, after :meth:`step`."""
        offered = getattr(output, "kv_connector_block_state", None)
        return self._tables.get(name) if offered is None else offered.get_block_ids(name)

    def step(self, output: Any) -> None:
        """Note what the step of ``output`` adds."""
        if getattr(output, "kv_connector_block_state", None) is not None:
            return
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = tuple(list(group) for group in new.block_ids)
        cached = output.scheduled_cached_reqs
        for name, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids and added is not None:
                self._tables[name] = tuple(list(group) for group in added)
            elif added is not None and name in self._tables:
                for group, more in zip(self._tables[name], added, strict=True):
                    group.extend(more)

    def forget(self, name: str) -> None:
        """The request has ended."""
        self._tables.pop(name, None)
