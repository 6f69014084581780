#!/usr/bin/python3
"""Tries the trials against a cluster in memory (model.py): each holds there, and fails with the defect that it is for."""

import contextlib
import io
import json
import pathlib
import sys
import threading
import unittest
from unittest import mock

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "journey"))

import objects  # noqa: E402
import set_up  # noqa: E402
import wait  # noqa: E402
from api import Api, Refused  # noqa: E402
from cluster import Cluster  # noqa: E402
from model import TOKEN, Model  # noqa: E402
from objects import NAMESPACE, RESOURCE, container, deployment, pod  # noqa: E402
from trials import basic, drains, force, kills, reboot, restarts, security, shapes, updates  # noqa: E402

LIMITS = {"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=35942M", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}

# Each defect with the trial that has to find it, and words of the failure.
DEFECTS = [
    ("a slice is given twice", basic, "the reason why the fifth pod waits: .* next: Running"),
    ("a drained slice is counted twice", drains, "3 allocatable slices: .* 2"),
    ("a taken slice fails the next pod", force, "free-0-next: Failed; StartError"),
    ("a restart of the service ends clients", kills, "the PIDs after: yunion-mps-daemon is restarted: .*, not "),
    ("a reboot ends a pod", reboot, "alone: Failed"),
    ("a drain ends pods with init containers", restarts, "init: Failed"),
    ("pods in back-off are ended", restarts, "the pod in back-off outlasts restart 1 does not hold"),
    ("quota ignored", security, "the third pod is above the quota does not hold: it was taken"),
    ("policy ignored", shapes, "the policy: not within"),
    ("a stop hits the neighbour", updates, "clients of neighbour: "),
]

# A thing that does not come here in that time never comes. A busy machine has more time where something has to come.
NEVER, SURELY = 1, 60


class WithModel(unittest.TestCase):
    """Has a model, which takes the place of the node."""

    def model(self, *defects):
        model = Model(*defects)
        self.addCleanup(model.server_close)
        self.addCleanup(model.shutdown)
        node = {"run": model.run, "mpsctl": model.rows, "environment": lambda _: LIMITS}
        for patch in [
            mock.patch.multiple("node", **node),
            mock.patch("os.kill", model.kill),
            mock.patch("wait.SECONDS", NEVER if defects else SURELY),
            mock.patch("wait.PAUSE", 0.05),
        ]:
            patch.start()
            self.addCleanup(patch.stop)
        return model

    def setUp(self):
        said = contextlib.redirect_stdout(io.StringIO())
        self.said = said.__enter__()
        self.addCleanup(said.__exit__, None, None, None)


class Trials(WithModel):
    def take(self, trial, model):
        """Takes a trial from its beginning to an empty node."""
        cluster = Cluster(Api(model.url, TOKEN))
        trial.trial(cluster)
        if hasattr(trial, "after_reboot"):
            model.reboots()
            set_up.wait_until_ready(cluster)
            trial.after_reboot(cluster)
        cluster.empty()

    def test_every_trial_holds_where_the_cluster_is_as_it_has_to_be(self):
        for trial in (basic, drains, force, kills, reboot, restarts, security, shapes, updates):
            with self.subTest(trial.__name__):
                self.take(trial, self.model())

    def test_each_defect_is_found_by_its_trial(self):
        for defect, trial, words in DEFECTS:
            with self.subTest(defect), self.assertRaisesRegex(wait.Failed, words):
                self.take(trial, self.model(defect))


class Helpers(WithModel):
    def setUp(self):
        super().setUp()
        self.server = self.model()
        self.api = Api(self.server.url, TOKEN)
        self.cluster = Cluster(self.api)

    def test_an_object_is_created_once_found_and_deleted(self):
        self.assertTrue(self.api.answers())
        self.cluster.create(pod("first"))
        self.assertEqual(self.cluster.phase("first"), "Running")
        self.assertEqual([one["metadata"]["name"] for one in self.cluster.pods()], ["first"])
        with self.assertRaisesRegex(Refused, "409: first already exists"):
            self.cluster.create(pod("first"))
        self.cluster.delete("first", seconds=0)
        self.assertIsNone(self.cluster.phase("first"))
        deleted = [body for method, _, _, _, body in self.server.calls if method == "DELETE"]
        self.assertEqual(deleted, [{"propagationPolicy": "Background", "gracePeriodSeconds": 0}])
        # A pod that is gone is no error.
        self.cluster.delete("first")

    def test_a_question_makes_nothing(self):
        self.assertIsNone(self.cluster.refusal(pod("one")))
        self.assertEqual(self.cluster.pods(), [])

    def test_a_stranger_is_refused_and_a_server_that_is_gone_does_not_answer(self):
        with self.assertRaisesRegex(Refused, "401: Unauthorized"):
            Api(self.server.url, "another").list("Node")
        self.server.shutdown()
        self.server.server_close()
        self.assertFalse(self.api.answers())

    def test_a_wait_in_vain_tells_the_story_of_the_pod(self):
        self.server.put("Pod", "lost", status={"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no"})
        self.server.put("Event", "lost.1", reason="FailedScheduling", message=f"Insufficient {RESOURCE}")
        self.server.put("Event", "lost.2", reason="Pulled", message="there")
        story = f"lost: Failed; UnexpectedAdmissionError; no; FailedScheduling: Insufficient {RESOURCE}"
        self.assertEqual(self.cluster.story("lost"), story)
        vainly = self.assertRaisesRegex(wait.Failed, f"the phase Running of lost: not within 0.1 s. {story}")
        with mock.patch("wait.SECONDS", 0.1), vainly:
            self.cluster.wait_for_phase("lost", "Running")

    def test_a_wait_ends_as_soon_as_its_condition_holds(self):
        self.server.put("Pod", "slow", status={"phase": "Pending"})
        timer = threading.Timer(0.1, lambda: self.server.put("Pod", "slow", status={"phase": "Running"}))
        timer.start()
        self.addCleanup(timer.join)
        self.cluster.wait_for_phase("slow", "Running")

    def test_a_pod_is_a_client_when_the_service_knows_it_by_its_name(self):
        for name in ("one", "two"):
            self.server.put("Pod", name, status={"phase": "Running"})
        one, two, other = {"ml/one/main": 11}, {"ml/two/main": 22}, {"ml/other/main": 33}
        looks = iter([{}, one | other, one | two | other])
        with mock.patch("node.clients", lambda: next(looks)):
            self.assertEqual(self.cluster.wait_until_client("one", "two"), one | two)

    def test_a_node_is_empty_when_nothing_is_left_and_every_slice_is_offered(self):
        self.cluster.create(pod("first"), deployment("served", 2), objects.quota("slices"))
        self.server.drained.add("00:06.0-3")
        self.cluster.empty()
        made = [path for path in self.server.objects if NAMESPACE in path and "serviceaccounts" not in path]
        self.assertEqual((made, self.server.owners, self.server.drained), ([], {}, set()))
        deleted = [(path, body) for method, path, _, _, body in self.server.calls if method == "DELETE"]
        policies = {path.split("/")[-2]: body["propagationPolicy"] for path, body in deleted}
        self.assertEqual(policies, {"pods": "Background", "deployments": "Foreground", "resourcequotas": "Foreground"})

    def test_a_roll_out_is_over_when_every_replica_is_new_and_no_other_is_left(self):
        done = {"observedGeneration": 1, "replicas": 3, "updatedReplicas": 3, "availableReplicas": 3}
        for change, over in [({}, True), ({"observedGeneration": 0}, False), ({"replicas": 4}, False)]:
            self.server.put("Deployment", updates.NAME, status={**done, **change})
            self.assertEqual(updates.rolled_out(self.cluster), over, change)

    def test_an_update_changes_the_template_alone(self):
        self.cluster.create(deployment(updates.NAME, 3))
        updates.update(self.cluster, 7)
        method, _, _, content, body = self.server.calls[-1]
        self.assertEqual((method, content), ("PATCH", "application/strategic-merge-patch+json"))
        self.assertEqual(body, {"spec": {"template": {"metadata": {"annotations": {"update": "7"}}}}})

    def test_what_does_not_hold_fails(self):
        with self.assertRaisesRegex(wait.Failed, "the PIDs: 1, not 2"):
            wait.same("the PIDs", 1, 2)
        with self.assertRaisesRegex(wait.Failed, "all is well does not hold: it is not"):
            wait.holds("all is well", False, "it is not")


def all_objects():
    """One object of each kind that the trials create, for manifests.py."""
    made = [thing for _, thing, _ in shapes.VERDICTS]
    made += [objects.namespace("level", **{"a/b": "c"}), objects.quota("slices", **{f"requests.{RESOURCE}": "2"})]
    made.append(deployment("rolls", 3, container(command=objects.COMPUTE), runtimeClassName="yunion-mps"))
    return made


if __name__ == "__main__":
    if sys.argv[1:] == ["objects"]:
        # A document of YAML each; JSON is YAML.
        print("\n---\n".join(json.dumps(one) for one in all_objects()))
    else:
        unittest.main()
