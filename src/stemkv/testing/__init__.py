"""Conformance suites and samples for whoever writes a tier of their own.

    from stemkv.testing import TierConformance, samples

    class TestMyTier(TierConformance):
        def make_tier(self, max_bytes): ...
        def alter(self, tier, ref, change): ...
        def failing(self, tier): ...

pytest collects the inherited tests. They need nothing but stemkv, except for the one that compares the tier with a
model under any sequence of calls: it needs hypothesis.
"""

from stemkv.testing import samples
from stemkv.testing.conformance import TierConformance

__all__ = ["TierConformance", "samples"]
