"""A startup kit made safe: what a job may not bring, what the server's people may not do, by FLARE's own judgement."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

from nvflare.fuel.sec.authz import AuthzContext, Person
from nvflare.private.fed.app.default_app_validator import DefaultAppValidator
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.security.security import FLAuthorizer

from medfl.core.errors import InputError
from medfl.flare import offer as flare_offer
from medfl.flare.parts import ALLOWED
from medfl.flare.sentry import Sentry
from medfl.flare.serve import secure
from medfl.flare.site_config import SiteConfig
from tests.support.deep import deep_folder

ROLES = ("project_admin", "org_admin", "lead", "member")
LEAD = {"submit_job": "any", "byoc": "any", "shell_commands": "o:site", "view": "any"}
STREAMER = "nvflare.app_common.logging.site_log_streamer.SiteLogStreamer"


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """What FLARE provisions, but for certificates."""
    for folder in ("startup", "local"):
        (tmp_path / folder).mkdir()
    (tmp_path / "startup" / "fed_client.json").write_text('{"format_version": 2}')
    listed = {
        "class_list_enforcement_mode": "warn", "class_allow_list": ["*"], "allow_log_streaming": True,
        "components": [{"id": "launcher", "path": "a.B"}, {"id": "site_log_streamer", "path": STREAMER}],
    }  # fmt: skip
    (tmp_path / "local" / "resources.json.default").write_text(json.dumps(listed))
    granting = {"format_version": "1.0", "permissions": {"project_admin": "any", "lead": LEAD}}
    (tmp_path / "local" / "authorization.json.default").write_text(json.dumps(granting))
    return tmp_path


@pytest.fixture
def commands() -> Iterator[list[Any]]:
    known = ClientRequestProcessors.request_processors
    before = list(known)
    yield known
    known[:] = before


def granted(kit: Path, right: str) -> list[str]:
    """The roles that FLARE gives a right, at a site of the submitter's own organisation."""
    judge = FLAuthorizer("org", json.loads((kit / "local" / "authorization.json").read_text()))
    people = {role: Person("somebody", "org", role) for role in ROLES}
    return [
        role for role, who in people.items() if judge.authorize(AuthzContext(right, who, who))[0]
    ]


def test_nobody_brings_code_or_gets_a_shell_at_a_site(kit: Path) -> None:
    secure(kit, "site", ALLOWED)
    for right in (
        "byoc",
        "server-predeployed-flwr",
        "shell_commands",
        "cat",
        "ls",
        "show_errors",
        "restart",
        "call",
    ):
        assert granted(kit, right) == [], right
    assert granted(kit, "abort_job") == list(ROLES)
    secure(kit, "site", ALLOWED)


def test_at_a_server_nobody_brings_code_and_the_rest_is_as_it_came(kit: Path) -> None:
    secure(kit, "server", ALLOWED)
    assert granted(kit, "byoc") == []
    assert granted(kit, "submit_job") == ["project_admin", "lead"]
    assert granted(kit, "restart") == ["project_admin"]


@pytest.mark.parametrize(
    "permissions",
    [
        {"project_admin": "any"},
        {"lead": {"byoc": "o:site"}},
        {"lead": {"byoc": ["none", "n:somebody"]}},
        {"lead": {"byoc": "not o:other"}},
        {"lead": {"shell_commands": "any"}},
        {"lead": {"view": "any", "cat": "any"}},
    ],
)
def test_a_site_does_not_start_with_a_policy_that_grants_code_or_commands(
    kit: Path, permissions: Any
) -> None:
    policy = {"format_version": "1.0", "permissions": permissions}
    (kit / "local" / "authorization.json").write_text(json.dumps(policy))
    with pytest.raises(
        InputError, match=r"authorization\.json grants .*; set it to none, or remove the file"
    ):
        secure(kit, "site", ALLOWED)
    assert not (kit / "local" / "resources.json").exists()


def test_policies_that_grant_nothing_are_taken_and_others_that_flare_cannot_read_are_not(
    kit: Path,
) -> None:
    path = kit / "local" / "authorization.json"
    for lead in (
        "none",
        {"byoc": "none", "view": "any"},
        {"byoc": ["not any", "o:site"]},
        {"byoc": ["none", "no"]},
    ):
        path.write_text(json.dumps({"format_version": "1.0", "permissions": {"lead": lead}}))
        secure(kit, "site", ALLOWED)
    for text in ("{", "[]", '{"format_version": "1.0", "permissions": {"lead": 3}}'):
        path.write_text(text)
        with pytest.raises(InputError):
            secure(kit, "site", ALLOWED)


def test_a_job_may_name_medfl_s_classes_alone_and_logs_stay(kit: Path) -> None:
    secure(kit, "site", ALLOWED)
    made = json.loads((kit / "local" / "resources.json").read_text())
    assert made["class_allow_list"] == ALLOWED == made["app_validator"]["args"]["classes"]
    assert made["class_list_enforcement_mode"] == "enforce"
    assert made["allow_log_streaming"] is False
    assert [one["id"] for one in made["components"]] == ["launcher"]


def test_a_kit_that_takes_jobs_that_nobody_signed_is_refused(kit: Path) -> None:
    (kit / "startup" / "fed_client.json").write_text('{"require_signed_jobs": false}')
    with pytest.raises(InputError, match="require_signed_jobs is false; jobs that somebody signed"):
        secure(kit, "site", ALLOWED)


def test_the_site_s_file_names_further_classes_in_full(tmp_path: Path) -> None:
    path = tmp_path / "medfl.yaml"
    path.write_text("bundle: mednist\nfolder: states\nclasses: [own.module.Class]\n")
    assert SiteConfig.read(path).classes == ("own.module.Class",)
    for wrong in ("'*'", "os.", "subprocess", "3"):
        path.write_text(f"bundle: mednist\nfolder: states\nclasses: [{wrong}]\n")
        with pytest.raises(InputError, match="classes"):
            SiteConfig.read(path)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("jobs") / "out"
    asked: dict[str, Any] = {
        "config": {"network": "small_cnn"},
        "requested": {"rounds": 1},
        "rehearsal": True,
    }
    return Path(flare_offer.export("mednist", ["north"], out, **asked)["job"]) / "app"


def test_medfl_s_jobs_pass_the_sentry_and_code_does_not(job: Path, commands: list[Any]) -> None:
    sentry = Sentry(ALLOWED)
    (job / ".__nvfl_sig.json").write_text("{}")
    assert DefaultAppValidator("client").validate(str(job)) == ("", {})
    assert sentry.validate(str(job)) == ("", {})
    client = job / "config" / "config_fed_client.json"
    text = client.read_text()
    for change in (
        text.replace(
            '"components": []',
            '"components": [{"id": "x", "path": "subprocess.Popen", "args": {}}]',
        ),
        text.replace(
            '"components": []', '"components": [{"id": "x", "name": "Popen", "args": {}}]'
        ),
        text.replace(
            '"components": []',
            '"components": [{"id": "x", "path": ["subprocess.Popen"], "args": {}}]',
        ),
        text.replace('"args": {}', '"args": {"a": [{"class_path": "os.system"}]}'),
        text.replace(ALLOWED[1], "medfl.flare.parts.MedflExecutor"),
    ):
        assert change != text
        client.write_text(change)
        assert "is not on this site's list" in sentry.validate(str(job))[0]
    for change in ("{", "[" * 100_000, " " * 2_000_000):
        client.write_text(change)
        assert sentry.validate(str(job))[0]
    client.write_text(text)
    for name in ("custom/evil.py", "custom/a.json", "config/x.conf", "config/evil.py"):
        path = job / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
        assert "brings no code here" in sentry.validate(str(job))[0]
        path.unlink()
        if path.parent.name == "custom":
            path.parent.rmdir()
    (job / "config" / "link.json").symlink_to("/etc/hostname")
    assert "neither a file nor a folder" in sentry.validate(str(job))[0]
    (job / "config" / "link.json").unlink()
    (job / "deep").mkdir()
    with deep_folder(job / "deep"):
        assert "or lies below 100 others" in sentry.validate(str(job))[0]

    (job / "deep").rmdir()
    assert sentry.validate(str(job)) == ("", {})


def test_flare_s_commands_that_show_files_are_gone(commands: list[Any]) -> None:
    """FLARE asks its policy about a command only where the server's message says that it should."""
    topics = {topic for one in commands for topic in one.get_topics()}
    Sentry(ALLOWED)
    gone = topics - {topic for one in commands for topic in one.get_topics()}
    assert "sys.shell" in gone or any("shell" in topic for topic in gone)
    assert any("deploy" in topic for one in commands for topic in one.get_topics())
