"""The ``Cache-Status`` header (RFC 9211) of a completion.

    stemkv; hit; detail="cached=4032; prompt=4096; tier=file"
    stemkv; fwd=partial; detail="cached=4032; prompt=8120; tier=file; miss=diverged"
    stemkv; fwd=miss; detail="cached=0; prompt=4096; miss=unseen"

``hit``: everything that can be cached was (at least one token is always computed). ``fwd=partial``: some of the
prompt was, and ``miss`` says why not more. ``fwd=miss``: none was. ``detail`` always has ``cached`` and
``prompt`` (tokens), then ``tier`` (several are joined with ``+``) and ``miss`` (a cause of ``stemkv.misses``,
with ``:detail`` where there is one). ``hit`` and ``fwd`` exclude each other, as the RFC wants. A request with
several prompts has the status of the first.
"""

from __future__ import annotations

from stemkv.engines.sampling import Lookup


def outcome(lookup: Lookup) -> str:
    """``hit``, ``partial`` or ``miss``: the header's verdict in one word."""
    if lookup.miss is None:
        return "hit"
    return "partial" if lookup.cached_tokens else "miss"


def header(lookup: Lookup) -> str:
    """The header's value."""
    word = outcome(lookup)
    parts = [f"cached={lookup.cached_tokens}", f"prompt={lookup.prompt_tokens}"]
    if lookup.tiers and lookup.cached_tokens:
        parts.append(f"tier={'+'.join(lookup.tiers)}")
    if lookup.miss is not None:
        parts.append(f"miss={lookup.miss}")
    verdict = "hit" if word == "hit" else f"fwd={word}"
    return f"stemkv; {verdict}; detail={quoted('; '.join(parts))}"


def quoted(text: str) -> str:
    """A structured-field string (RFC 9651): printable ASCII, with quotes and backslashes escaped."""
    plain = "".join(c if " " <= c <= "~" else "?" for c in text)
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'
