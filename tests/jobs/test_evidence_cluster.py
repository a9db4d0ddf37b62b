"""What is kept of an incident that several hosts saw."""

import unittest

from cluster import ClusterTest, setUpModule
from evidence import EvidenceTest

__all__ = ["setUpModule"]

RANKS = 16
NODES = 4


class Hosts(ClusterTest, EvidenceTest):
    """Four hosts of four ranks each."""

    def test_origins_of_several_hosts(self):
        self.cluster.do("up", "--nodes", NODES)
        three = [word for rank in (5, 6, 14) for word in ("--inject", f"nan@loss,rank={rank},attempt=1")]
        job = self.capture(*three, "--inject", "inf@loss,rank=all,attempt=9", "--print-digests", ranks=RANKS, steps=12,
                           policy="")
        few, all_of_them = self.bundles(job).values()

        places = [(5, "node1"), (6, "node1"), (14, "node3")]
        manifest = self.manifest(few)
        self.assertEqual(places, [(origin["rank"], origin["host"]) for origin in manifest["origins"]])
        self.assertEqual([5, 6, 14], self.origin_ranks(few))
        self.assertNotIn("omitted", manifest)
        self.assert_topology(manifest)

        manifest = self.manifest(all_of_them)
        self.assertEqual(list(range(RANKS)), [origin["rank"] for origin in manifest["origins"]])
        self.assertEqual((RANKS, RANKS), (manifest["ranks"], manifest["pos_inf"]))
        self.assertEqual([0, 4, 8, 12], self.origin_ranks(all_of_them), "one of each host")
        self.assertEqual([("evidence of 12 more origins", "max_full_origins: 4")],
                         [(omitted["what"], omitted["why"]) for omitted in manifest["omitted"]])
        report = (all_of_them / "report.md").read_text()
        self.assertIn("`evidence of 12 more origins`", report)
        self.assertIn("`max_full_origins: 4`", report)
        self.assert_topology(manifest)

        self.assert_whole(job, 2)
        self.assert_lockstep(job, RANKS, attempts=12, updates=10)

    def test_the_examiner_is_on_another_host(self):
        self.cluster.do("up", "--nodes", 2)
        job = self.capture("--inject", "nan@loss,rank=1,attempt=1", "--fault", "corrupt-record,rank=2,attempt=9",
                           "--print-digests", ranks=4, steps=12, policy="")
        examined = [self.manifest(bundle)["cross_examination"] for bundle in self.bundles(job).values()]
        self.assertEqual([("SUSPECT_DEVICE", 1, "node0", 2, "node1", "OTHER_HOST"),
                          ("DATA_OR_MODEL", 2, "node1", 0, "node0", "OTHER_HOST")],
                         [tuple(one[key] for key in ("outcome", "origin", "origin_host", "examiner", "examiner_host",
                                                     "where")) for one in examined])
        self.assert_whole(job, 2)
        self.assert_lockstep(job, 4, attempts=12, updates=10)

    def assert_topology(self, manifest):
        first, *hosts = manifest["topology"].splitlines()
        self.assertEqual("16 ranks on 4 hosts", first)
        for node, line in enumerate(hosts):
            self.assertRegex(line, f"^  node{node}: ranks {4 * node}-{4 * node + 3} ")
        self.assertEqual(NODES, len(hosts))


if __name__ == "__main__":
    unittest.main()
