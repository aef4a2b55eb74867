"""The instances of foreign verifiers, and the laws of named faults in them."""

import numpy as np
import pytest

from jaxspec import audit
from jaxspec.audit import faults, settings, suspects
from jaxspec.audit.choices import Uniforms
from jaxspec.audit.reference import PLAIN_RULES, Nodes


@pytest.mark.parametrize("kind", settings.KINDS)
def test_every_rule_of_a_kind_emits_the_targets_text_and_every_fault_another(kind):
    chosen = [make for make in settings.settings_of_kind(kind, True) if make.vocab < 100]

    def text(setting, law):
        found = {}
        for (_, emitted), mass in law.items():
            for rest, chance in setting.follow(emitted, setting.depth + 1 - len(emitted)).items():
                found[emitted + rest] = found.get(emitted + rest, 0) + mass * chance
        return found

    def distance(setting, suspect):
        law = text(setting, suspect.law(setting))
        keys = {*law, *setting.text}
        return sum(abs(law.get(k, 0) - setting.text.get(k, 0)) for k in keys) / 2

    for setting in chosen:
        assert setting.chances.sum() == pytest.approx(1, abs=1e-12)
        for rule in suspects.right_rules(kind).values():
            assert distance(setting, rule) < 1e-12
    words = [fault.words for fault in faults.faults_of_kind(kind)]
    assert len(words) == len(set(words)) > 30
    for fault in faults.faults_of_kind(kind):
        assert any(distance(setting, fault) > 1e-6 for setting in chosen), fault.words


def test_a_plain_rule_behind_the_interface_is_proved_as_it_is():
    """Any rule of the reference, replayed by uniforms, is a foreign verifier."""

    def verify(tokens, parents, draft_rows, target_rows, uniforms):
        count = len(tokens)
        children = [[n for n in range(count) if parents[n] == node] for node in range(count)]
        rows = [
            (np.float64(p), np.float64(q)) for p, q in zip(target_rows, draft_rows, strict=True)
        ]
        nodes = Nodes(children, lambda now, choices: int(tokens[now.child]), rows.__getitem__, True)

        def draw(slot):
            return (
                0.0
                if "tile" in slot
                else float(uniforms[int(slot.split()[1]) - 1 if " " in slot else -1])
            )

        outcome = PLAIN_RULES["traversal"].verify(nodes, Uniforms(draw))
        return list(outcome.tokens), list(outcome.path[1:])

    cases = [case for case in settings.instances_of_kind("without_replacement") if case.vocab < 100]
    report = audit.check_lossless(
        verify,
        kind="without_replacement",
        randomness="uniforms",
        rule="traversal",
        instances=cases[:3],
        budget=30_000,
    )
    assert report.passes, str(report)
    assert all(result.is_exact for result in report.results)
