"""What comes from outside, and the one function that each kind of it passes before it is used (docs/security.md)."""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """A kind of thing that comes from outside: who sends it, which function checks it, what it checks, what remains."""

    what: str
    sender: str
    validator: str
    checks: str
    remains: str


BORDER = (
    Entry(
        "bundle: its files",
        "whoever made it",
        "medfl.policy.admission.admit",
        "every file hashed and of a known kind, no links; plain JSON and YAML; components, imports and expressions on "
        "explicit lists; every bundle that a run opens: the sites' own, public data, teachers",
        "an expression that uses much time or memory; what the words of a policy, or --trust, allow",
    ),
    Entry(
        "bundle: a `_target_`",
        "whoever made it",
        "medfl.policy.components.component",
        "one listed class or function of MONAI, PyTorch, ignite or medfl, compared by identity; it is what is called",
        "faults of these classes themselves",
    ),
    Entry(
        "bundle: a `$` expression",
        "whoever made it",
        "medfl.policy.evaluate.Evaluator",
        "each attribute by the type of its object, each call, each growing operation; files are looked at only below "
        "the bundle and the folders that the user named, and never changed",
        "reading of what lies below these folders; images, wherever a list of items says that they lie (the sandbox "
        "limits that)",
    ),
    Entry(
        "job: run.json of a federation",
        "the operator, or a lead at another hospital",
        "medfl.flare.site_config.accepted_run",
        "the same at server and site: types, names, plain values of permitted ids, the bundle's hash, the method and "
        "the settings that the policy allows",
        "a legitimate method with settings that learn badly",
    ),
    Entry(
        "message: weights and numbers",
        "server or site",
        "medfl.core.message.verify",
        "names, shapes, types, sizes and finite values as expected, before anything is made of them",
        "values within bounds that are chosen to harm",
    ),
    Entry(
        "run folder",
        "whoever could write there",
        "medfl.core.run_integrity.verified_manifest",
        "checksums, types, counts and depth before anything is built; State files are plain files of the folder",
        "weights that were exchanged together with their checksums",
    ),
    Entry(
        "reply: counts, norms, shares",
        "a site",
        "medfl.runtimes.server.claims.far_replies",
        "whole counts, at most what the site told at its introduction and the roster allows; norms at most 1000 times "
        "the middle one; shares at most `--max-share`",
        "poisoned weights within these bounds",
    ),
    Entry(
        "run.json of a run that is repeated or resumed",
        "whoever gave the file",
        "medfl.core.run_folder.read_run",
        "size, depth, types and limits of every setting, the run's hash",
        "a method may be named by a dotted path, which is imported: repeat only runs of people whom you trust",
    ),
    Entry(
        "initial weights (`--init`)",
        "a user, or a job",
        "medfl.runs.initial_weights.tensors",
        "safetensors, or `torch.load` with `weights_only`; finite values, the hash in the run's record, and by "
        "`medfl.runtimes.beginning.begun` names, shapes and kinds of the network's tensors",
        "weights that were trained to mislead",
    ),
    Entry(
        "text embeddings",
        "a user, or a job",
        "medfl.bundle.text_embeddings.load",
        "safetensors only; shape, classes and finite values",
        "embeddings of another model under its name",
    ),
    Entry(
        "statistics of a site",
        "a partner",
        "medfl.partner.heterogeneity.read",
        "size, depth, types, bins and counts",
        "invented numbers",
    ),
    Entry(
        "policy",
        "the site's own file, never a wire",
        "medfl.policy.policy.Policy.read",
        "known keys, words and limits; nothing in it can trust a bundle",
        "what its author allows",
    ),
)
