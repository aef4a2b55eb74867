"""A custom source of rows, 40 lines long, is verified by every rule as the equivalent dense rows."""

import dataclasses
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.random_rounds import WIDE, WIDE_BATCH, Rounds, play, random_rounds

import jaxspec as js
from jaxspec import audit

each_rule = pytest.mark.parametrize("rule", js.RULES.values(), ids=js.RULES)


@js.struct
class Quantized(js.RowSource):
    """Rows stored as int8 weights, of which one token per sequence is forbidden.

    Attributes:
      values: int8 [R, V], weights >= 0; a row's law is its weights, without the forbidden token's,
        over their sum.
      forbidden: int32 [], a token; V for none.
    """

    forbidden: jax.Array  # []

    def visit(self, row: js.StoredRow) -> jax.Array:
        """Return the sum of the weights."""
        return row.sum(self._weights)

    def probability(self, entries: jax.Array, tokens: jax.Array, norm: jax.Array) -> jax.Array:
        """Return the weights over their sum."""
        return self._weights(entries, tokens) / jnp.where(norm == 0, 1.0, norm)

    def _weights(self, entries: jax.Array, tokens: jax.Array) -> jax.Array:
        weights = jnp.where(entries < 0, jnp.inf, entries.astype(jnp.float32))
        return jnp.where(tokens == self.forbidden, 0.0, weights)


@dataclasses.dataclass
class Quantization:
    """A batch of rounds whose rows are quantized, and the same rounds with the equivalent rows."""

    rounds: Rounds
    forbidden: jax.Array  # [B]
    weights: dict[str, np.ndarray]  # int8 [B, N, V] for the target and the draft

    @classmethod
    def of(cls, rule: js.Rule, seed: int, **sizes: int) -> "Quantization":
        rounds = random_rounds(rule, seed, **sizes)
        generator = np.random.default_rng(seed)
        batch, _, vocab = rounds.target.shape
        forbidden = generator.integers(0, vocab + 1, batch)
        weights = {}
        for name in ("target", "draft"):
            rows = getattr(rounds, name)
            stored = np.ceil(100 * rows / rows.max(axis=-1, keepdims=True)).astype(np.int8)
            is_kept = np.arange(vocab) != forbidden[:, None, None]
            stored[..., 0] += (stored * is_kept).sum(axis=-1) == 0
            stored[..., 1] += (stored * is_kept).sum(axis=-1) == 0
            weights[name] = stored
            kept = (stored * is_kept).astype(np.float64)
            getattr(rounds, name)[...] = kept / kept.sum(axis=-1, keepdims=True)
        return cls(rounds, jnp.asarray(forbidden, jnp.int32), weights)

    def arguments(self, kind: type[js.Proposal]) -> tuple:
        draws, proposal, _, bonus = self.rounds.arguments(kind)
        target, draft = (
            Quantized(values=jnp.asarray(self.weights[name]), forbidden=self.forbidden)
            for name in ("target", "draft")
        )
        if kind is not js.PointMass:
            proposal = dataclasses.replace(proposal, draft_rows=draft)
        return draws, proposal, target, bonus


def test_records_of_the_same_fields_are_never_taken_for_one_another_by_jit() -> None:
    """Programs are looked up by structure: equal ones would verify by the other's law, by chance."""

    @js.struct
    class Plain(js.RowSource):
        def visit(self, row: js.StoredRow) -> jax.Array:
            return row.sum(lambda entries, _: entries)

        def probability(self, entries: jax.Array, tokens: jax.Array, norm: jax.Array) -> jax.Array:
            return entries / norm

    tree, rows = js.make_tree([-1, 0], [-1, 0]), jnp.ones((2, 2)) / 2
    kinds = (js.PointMass, js.WithReplacement, js.WithoutReplacement)
    records = [kind(tree=tree, draft_rows=rows) for kind in kinds]
    records += [Plain(values=rows), js.Probabilities(values=rows)]
    structures = [jax.tree.structure(record) for record in records]
    for one, other in itertools.combinations(structures, 2):
        assert one != other


def test_a_source_that_jit_could_take_for_another_is_rejected_with_what_to_do() -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Unsafe(Quantized):
        pass

    rows = Unsafe(values=jnp.ones((1, 2), jnp.int8), forbidden=jnp.int32(2))
    with pytest.raises(
        ValueError, match=r"rows is a Unsafe, .*Decorate Unsafe with jaxspec\.struct"
    ):
        js.dense_rows(rows, 1)


def assert_verified_alike(rule: js.Rule, quantized: Quantization) -> None:
    found = jax.jit(jax.vmap(rule.verify))(*quantized.arguments(rule.proposal))
    wanted = play(rule, quantized.rounds)
    for name, values in vars(wanted).items():
        np.testing.assert_array_equal(getattr(found, name), values, err_msg=name)


@each_rule
def test_a_custom_source_is_verified_as_the_equivalent_rows(rule: js.Rule) -> None:
    quantized = Quantization.of(rule, 70)
    assert_verified_alike(rule, quantized)
    is_replaced = (quantized.weights["target"] > 0) & (quantized.rounds.target == 0)
    assert is_replaced.any(), "no token is forbidden: this test would prove nothing"


@pytest.mark.parametrize("name", ["token", "traversal"])
def test_a_batch_of_a_custom_source_over_a_large_vocabulary_is_verified_too(name: str) -> None:
    rule = js.RULES[name]
    assert_verified_alike(rule, Quantization.of(rule, 71, batch=WIDE_BATCH, vocab=WIDE))


def test_the_dense_rows_of_a_custom_source_are_its_law() -> None:
    values = jnp.array([[1, 2, 1], [4, 4, 0]], jnp.int8)
    source = Quantized(values=values, forbidden=jnp.int32(0), first=jnp.int32(1))
    assert js.dense_rows(source, 1).tolist() == [[0, 1, 0]]
    with pytest.raises(AssertionError):
        js.dense_rows(dataclasses.replace(source, values=values[0]), 1)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_a_custom_source_is_checked_and_flagged(name: str) -> None:
    rule = js.RULES["token"]
    quantized = Quantization.of(rule, 72)
    deep = np.argsort(-quantized.rounds.level_sizes.sum(axis=1))[:2]  # sequences with candidates
    twin = jax.jit(jax.vmap(js.checked(rule.verify)))
    assert twin(*quantized.arguments(rule.proposal))[0].get() is None
    quantized.weights[name][deep[1], 0, 3] = -1
    quantized.weights[name][deep[0], 0] = 0
    error, verdict = twin(*quantized.arguments(rule.proposal))
    first, mass = min((deep[0], "0.0"), (deep[1], "inf"))
    message = f"at mapped index {first}: {name} row 0: mass is {mass}, not a positive number"
    assert error.get().startswith(message)
    assert verdict.status[deep[0]] & js.Status.MASSLESS_ROW
    assert verdict.status[deep[1]] & js.Status.NON_FINITE_ROW


FORBIDDEN = 2


def quantized_rows(rows: jax.Array) -> Quantized:
    """Store rows [N, V] of eighths, with other weights where a token is forbidden."""
    weights = (64 * rows).astype(jnp.int8).at[:, FORBIDDEN].set(7)
    return Quantized(values=weights, forbidden=jnp.int32(FORBIDDEN))


@each_rule
def test_the_exact_law_of_a_custom_source_is_that_of_the_equivalent_rows(rule: js.Rule) -> None:
    def rows(*weights: int) -> list[Fraction]:
        return [Fraction(weight, 8) for weight in weights]

    is_fixed = rule.proposal is js.PointMass
    instance = audit.Instance(
        "a forbidden token",
        target={(): rows(4, 1, 0, 3), (1,): rows(1, 5, 0, 2)},
        draft=None if is_fixed else {(): rows(2, 3, 0, 3), (1,): rows(4, 2, 0, 2)},
        branching=(1, 1) if rule.is_path else (2,),
        candidates={(): (1, 3)} if is_fixed else None,
        bonus=True,
    )
    law = audit.exact_law(rule, instance, rows=quantized_rows)
    wanted = audit.exact_law(rule, instance)
    assert law.is_proved
    assert law.flagged == 0
    np.testing.assert_allclose(law.text, wanted.text, atol=1e-6)
    assert law.expected_accepted == pytest.approx(wanted.expected_accepted, abs=1e-6)
    assert not law.text[FORBIDDEN].any()
