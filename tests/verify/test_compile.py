"""The verifiers as programs: lowered for every platform, compiled once, batched in every way."""

import dataclasses
import re
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.random_rounds import BATCH, WIDE, Rounds, play, random_rounds
from jax import export

import jaxspec as js

each_rule = pytest.mark.parametrize("rule", js.RULES.values(), ids=js.RULES)

LARGE = 5000  # nine tiles of 512 and a tail; batched by offsets into one slab
WHOLE = 4096  # the least that is batched so: eight tiles and no tail


def assert_equal(first: js.Verdict, second: js.Verdict) -> None:
    for name, value in vars(first).items():
        assert np.array_equal(value, getattr(second, name)), name


def shapes_of(rule: js.Rule, vocab: int, *, logits: bool, batch: tuple[int, ...]) -> tuple:
    """Make the shapes of a verifier's arguments; nothing is computed."""
    nodes, slots, levels = (4, 1, 4) if rule.is_path else (4, 2, 3)

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*batch, *shape), jnp.int32)

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*batch, *shape), jnp.float32)

    rows = floats(nodes, vocab)
    if logits:
        rows = js.Logits(values=rows, temperature=floats())
    tree = js.Tree(
        tokens=ints(nodes),
        parents=ints(nodes),
        children=ints(nodes, slots),
        level_sizes=ints(levels),
    )
    if rule.proposal is js.PointMass:
        proposal = js.PointMass(tree=tree)
    else:
        proposal = rule.proposal(tree=tree, draft_rows=rows)
    draws = js.Draws(accept=floats(nodes), final=floats(2))
    return draws, proposal, rows, jax.ShapeDtypeStruct(batch, jnp.bool_)


def assert_lowered(verify: Callable[..., js.Verdict], shapes: tuple) -> None:
    platforms = ("cpu", "cuda", "tpu")
    assert export.export(jax.jit(verify), platforms=platforms)(*shapes).platforms == platforms


@each_rule
def test_every_rule_is_lowered_for_every_platform(rule: js.Rule) -> None:
    assert_lowered(rule.verify, shapes_of(rule, 7, logits=False, batch=()))


@pytest.mark.parametrize("name", ["token", "block", "point_mass", "traversal"])
def test_every_verifier_is_lowered_for_batches_of_logits_over_a_large_vocabulary(name: str) -> None:
    rule = js.RULES[name]
    assert_lowered(jax.vmap(rule.verify), shapes_of(rule, WIDE, logits=True, batch=(2,)))


READS = {"point_mass": 2, "token": 4, "block": 4}
"""Places of a program of logits that read rows: a visit and the final draw, of each slab."""


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_off_cpu_a_trip_reads_one_row_of_each_sequence_and_no_row_twice(
    name: str, platform: str
) -> None:
    """A walk has at most one trip for each node of a path: that is every row read once."""
    batch, rule = 3, js.RULES[name]
    shapes = shapes_of(rule, WIDE, logits=True, batch=(batch,))
    lowered = export.export(jax.jit(jax.vmap(rule.verify)), platforms=[platform])(*shapes)
    results = re.findall(r"stablehlo\.(\w+).*-> tensor<([0-9x]+)xf32>", lowered.mlir_module())
    reads = [shape for operation, shape in results if operation == "gather"]
    rows = [shape for shape in reads if shape.split("x")[-1] == str(WIDE)]
    assert len(rows) == READS[name], rows
    assert set(rows) <= {f"{batch}x{WIDE}", f"{batch}x1x{WIDE}"}
    nodes = shapes[0].accept.shape[1]
    assert not [shape for _, shape in results if shape == f"{batch}x{nodes}x{WIDE}"]


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Record every program that XLA is asked to compile."""
    found: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        del duration
        if "backend_compile" in event:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.jit(lambda x: x + len(found))(1.0)
    assert found, "the listener hears of no compilation: this test would prove nothing"
    found.clear()
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@each_rule
@pytest.mark.parametrize("logits", [False, True], ids=["probabilities", "logits"])
def test_lengths_draws_rows_trees_temperatures_and_bonus_compile_once(
    rule: js.Rule, logits: bool, compilations: list[str]
) -> None:
    play(rule, random_rounds(rule, 60), logits=logits)
    compilations.clear()
    for seed in range(61, 64):
        rounds = random_rounds(rule, seed, edge_draws=True)
        rounds.temperature[:] = seed - 61
        rounds.bonus[:] = seed % 2
        play(rule, rounds, logits=logits)
    assert compilations == []


def test_bonus_and_length_given_as_python_numbers_compile_once(compilations: list[str]) -> None:
    tokens, rows = jnp.array([0, 1, 0]), jnp.full((4, 2), 0.5)
    draws = js.Draws(accept=jnp.zeros(4), final=jnp.zeros(2))
    path = jax.jit(lambda length: js.PointMass(tree=js.chain(tokens, length)))

    def verify(length: int, bonus: bool) -> int:
        return int(js.verify_path(draws, path(length), rows, bonus).num_tokens)

    assert verify(3, True) == 4
    compilations.clear()
    assert [verify(length, bonus) for length in range(4) for bonus in (False, True)] == [
        *(1, 1),
        *(1, 2),
        *(2, 3),
        *(3, 4),
    ]
    assert compilations == []


@each_rule
def test_verdicts_do_not_depend_on_the_company_in_a_batch(rule: js.Rule) -> None:
    rounds = random_rounds(rule, 65, edge_draws=True)
    order = np.random.default_rng(65).permutation(BATCH)
    shuffled = Rounds(**{name: value[order] for name, value in vars(rounds).items()})
    verdict = play(rule, rounds)
    assert_equal(jax.tree.map(lambda x: x[order], verdict), play(rule, shuffled))


def large_rounds(rule: js.Rule, vocab: int, seed: int) -> Rounds:
    rounds = random_rounds(rule, seed, batch=8, vocab=vocab)
    rounds.accept[::2] *= 0.2  # so that paths of some length occur
    return rounds


@pytest.mark.parametrize(("name", "vocab"), [("token", LARGE), ("point_mass", WHOLE)])
def test_a_batch_over_a_large_vocabulary_is_the_loop_over_its_sequences(
    name: str, vocab: int
) -> None:
    rule = js.RULES[name]
    for seed in (66, 67):
        args = large_rounds(rule, vocab, seed).arguments(rule.proposal)
        batch = jax.vmap(rule.verify)(*args)
        one_by_one = [rule.verify(*jax.tree.map(lambda x, b=b: x[b], args)) for b in range(8)]
        assert_equal(batch, jax.tree.map(lambda *xs: jnp.stack(xs), *one_by_one))
        assert not batch.status.any()
        assert len(np.unique(batch.num_accepted)) > 1


def test_vmap_of_vmap_is_one_batch_over_a_large_vocabulary() -> None:
    rule = js.RULES["token"]
    args = large_rounds(rule, LARGE, 68).arguments(rule.proposal)
    nested = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]), args)
    twice = jax.vmap(jax.vmap(rule.verify))(*nested)
    flat = jax.tree.map(lambda x: x.reshape(8, *x.shape[2:]), twice)
    assert_equal(jax.vmap(rule.verify)(*args), flat)


def test_rows_shared_by_a_batch_or_read_by_offset_are_verified_as_copies() -> None:
    rule = js.RULES["token"]
    draws, proposal, target, bonus = large_rounds(rule, LARGE, 69).arguments(rule.proposal)
    final = jnp.broadcast_to(draws.final[:1], draws.final.shape)
    copies = jax.vmap(rule.verify)(
        dataclasses.replace(draws, final=final),
        proposal,
        jnp.broadcast_to(target[:1], target.shape),
        bonus,
    )
    # Sequences are in the slab in reverse, behind rows of no sequence.
    nodes = target.shape[1]
    drafts = proposal.draft_rows[::-1].reshape(-1, LARGE)
    slab = js.Probabilities(
        values=jnp.pad(drafts, ((2, 0), (0, 0)), constant_values=jnp.nan),
        first=jnp.arange(8, dtype=jnp.int32)[::-1] * nodes + 2,
    )
    by_offset = dataclasses.replace(
        proposal, tree=0, draft_rows=js.Probabilities(values=None, first=0)
    )
    verdict = jax.vmap(rule.verify, in_axes=(js.Draws(accept=0, final=None), by_offset, None, 0))(
        dataclasses.replace(draws, final=draws.final[0]),
        dataclasses.replace(proposal, draft_rows=slab),
        target[0],
        bonus,
    )
    assert_equal(copies, verdict)
