"""From the job file to a target: recognized by its URL, with a secret that is in no file of the run."""

from pathlib import Path
from typing import Any

import pytest

from rolecall.core.config.job import NotifyFormat, RecoveryConfig, parse_job
from rolecall.core.errors import ConfigError
from rolecall.recovery.notifications.target import SECRET_ENV, target_of, without_secret_urls

F = NotifyFormat


def _target(environ: dict[str, str] | None = None, **recovery: Any) -> Any:
    return target_of(RecoveryConfig(**recovery), environ or {})


def test_without_settings_there_is_no_channel() -> None:
    assert _target({SECRET_ENV: "k3y"}) is None


@pytest.mark.parametrize(
    ("url", "form"),
    [
        ("https://hooks.slack.com/services/T0/B0/X", F.SLACK),
        ("https://events.pagerduty.com/v2/enqueue", F.PAGERDUTY),
        ("https://events.eu.pagerduty.com/v2/enqueue", F.PAGERDUTY),
        ("https://api.opsgenie.com/v2/alerts", F.OPSGENIE),
        ("https://api.eu.opsgenie.com/v2/alerts", F.OPSGENIE),
        ("http://am:9093/api/v2/alerts", F.ALERTMANAGER),
        ("https://metrics.example/am/api/v2/alerts/", F.ALERTMANAGER),
        ("https://hooks.slack.com.evil.example/services", F.WEBHOOK),
        ("http://127.0.0.1:9999/hook", F.WEBHOOK),
    ],
)
@pytest.mark.parametrize("short", [True, False])
def test_a_service_is_recognized_by_its_url(url: str, form: NotifyFormat, short: bool) -> None:
    where: dict[str, Any] = {"webhook_url": url} if short else {"notify": {"url": url}}
    found = _target({SECRET_ENV: "k3y"}, **where)
    assert (found.format, found.url, found.secret) == (form, url, "k3y")


def test_a_format_has_its_own_address_and_the_secret_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("k3y\n")
    found = _target({SECRET_ENV: "another"}, notify={"format": "pagerduty", "secret_file": str(file)})
    assert (found.url, found.secret) == ("https://events.pagerduty.com/v2/enqueue", "k3y")
    found = _target({SECRET_ENV: "k3y"}, notify={"format": "opsgenie", "url": "https://api.eu.opsgenie.com/v2/alerts"})
    assert (found.url, found.secret) == ("https://api.eu.opsgenie.com/v2/alerts", "k3y")


def test_the_url_of_a_slack_webhook_is_its_secret() -> None:
    found = _target({SECRET_ENV: "https://hooks.slack.com/services/T0/B0/X"}, notify={"format": "slack"})
    assert (found.url, found.secret) == ("https://hooks.slack.com/services/T0/B0/X", "")


@pytest.mark.parametrize(
    ("recovery", "environ", "reason"),
    [
        ({"webhook_url": "http://a/s3cret", "notify": {"format": "slack"}}, "", "recovery.notify is set too"),
        ({"notify": {"format": "slack"}}, "", f"set {SECRET_ENV} or secret_file"),
        ({"notify": {"format": "pagerduty"}}, "", "needs its routing"),
        ({"webhook_url": "https://api.opsgenie.com/v2/alerts"}, "", "needs its API key"),
        ({"notify": {"format": "alertmanager"}}, "", "notify.url: is missing"),
        ({"notify": {"secret_file": "/nowhere/s"}}, "", "/nowhere/s: No such file"),
        ({"notify": {"format": "pagerduty"}}, "two s3cret words", "one word"),
        ({"notify": {"format": "slack"}}, "s3cret", "must be http"),
        ({"webhook_url": "ftp://host/s3cret"}, "", "webhook_url: must be http"),
        ({"webhook_url": "http:///s3cret"}, "", "webhook_url: must be http"),
        ({"notify": {"url": "hooks.example.org/s3cret"}}, "", "notify.url: must be http"),
        ({"notify": {"url": "http://[s3cret"}}, "", "notify.url: must be http"),
    ],
)
def test_a_wrong_setting_is_named_without_its_secret(recovery: dict[str, Any], environ: str, reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        _target({SECRET_ENV: environ} if environ else {}, **recovery)
    assert reason in str(raised.value) and "s3cret" not in str(raised.value)


def test_a_secret_in_the_job_file_is_refused_unread() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_job({"recovery": {"notify": {"format": "pagerduty", "routing_key": "s3cret"}}})
    assert "recovery.notify.routing_key: unknown key" in str(raised.value) and "s3cret" not in str(raised.value)


def test_who_is_notified_does_not_make_another_job() -> None:
    plain = parse_job({})
    assert parse_job({"recovery": {"notify": {"format": "slack"}}}).digest() == plain.digest()


@pytest.mark.parametrize(
    ("url", "form", "shown"),
    [
        ("https://hooks.slack.com/services/s3cret", "auto", "https://hooks.slack.com/***"),
        ("http://proxy:80/s3cret", "slack", "http://proxy:80/***"),
        ("http://am:9093/api/v2/alerts?s3cret", "auto", "http://am:9093/api/v2/alerts"),
        ("http://host:s3cret/", "auto", "***"),
        ("http://host/s3cret", "of another version", "***"),
    ],
)
def test_others_see_a_configuration_without_urls_that_are_secrets(url: str, form: str, shown: str) -> None:
    config = {"seed": 1, "recovery": {"mode": "act", "notify": {"url": url, "format": form}}}
    seen = {"seed": 1, "recovery": {"mode": "act", "notify": {"url": shown, "format": form}}}
    assert without_secret_urls(config) == seen
    if form == "auto":
        assert without_secret_urls({"recovery": {"webhook_url": url}}) == {"recovery": {"webhook_url": shown}}


@pytest.mark.parametrize("config", [{}, {"recovery": None}, {"recovery": {"webhook_url": None, "notify": {}}}])
def test_a_configuration_without_urls_is_shown_as_it_is(config: dict[str, Any]) -> None:
    assert without_secret_urls(config) == config
