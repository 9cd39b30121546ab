"""`megarlhf rl`: reinforcement learning from scores. `megarlhf ppo` is the same program for PPO, whose section may be
left out. This file has the checks and models; the configuration is in rl_config.py, the loop in online.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megarlhf import checkpoint, config
from megarlhf.algorithms.interface import OnlineAlgorithm
from megarlhf.cluster import job_checks
from megarlhf.cluster.parallel import Topology
from megarlhf.config import UserError
from megarlhf.data.loader import Loader
from megarlhf.data.prompts import PromptLoader, PromptSet, load_prompts
from megarlhf.data.sft import Examples, load_sft
from megarlhf.experience import sampler
from megarlhf.experience.sampler import Sampler
from megarlhf.models import adapters
from megarlhf.models.hydra import Hydra
from megarlhf.models.locate import find_model
from megarlhf.models.spec import check_length
from megarlhf.train import audit, evaluation, memory, online, planned, scoring, setup, work
from megarlhf.train.actions import Models, Pretraining, Progress
from megarlhf.train.program import Prepared, Program, training
from megarlhf.train.reference import check_resumed, record, weights_of
from megarlhf.train.rl_config import ALGORITHMS, OnlineRunConfig, load, run_config

if TYPE_CHECKING:
    from megarlhf.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Plan(setup.Plan):
    prompts: PromptSet
    held_out: PromptSet | None
    ptx: Examples | None
    reference: Path | None  # model directory; None: the same random weights as the policy's


def check(settings: OnlineRunConfig, world_size: int) -> Plan:
    """Refuse (UserError) a configuration that cannot work, on every rank alike, before anything is allocated."""
    sizes, training, samples = settings.parallel, settings.training, settings.sampler.samples_per_prompt
    name, algorithm = settings.algorithm, settings.value
    if samples < algorithm.group_size:
        raise UserError(
            f"sampler.samples_per_prompt: {name} compares the responses to a prompt, so it must be at least "
            f"{algorithm.group_size}, not {samples}"
        )
    data_size = sizes.data(world_size)
    share = training.minibatches * data_size
    if training.batch_size % share:
        raise UserError(
            f"training.batch_size: {training.batch_size} is not a multiple of minibatches {training.minibatches} x "
            f"{data_size} data-parallel ranks = {share}; change one"
        )
    if training.batch_size // data_size % samples:
        raise UserError(
            f"sampler.samples_per_prompt: {samples} does not divide the {training.batch_size // data_size} responses "
            "of a data-parallel rank; change it or training.batch_size"
        )
    if settings.sampler.response_length < algorithm.min_response_length:
        raise UserError(
            f"{name}.shaping.overlong_buffer: {algorithm.min_response_length - 1} must be below "
            f"sampler.response_length {settings.sampler.response_length}, or every response is penalised; change one"
        )
    if "actor" not in algorithm.updates(training.steps - 1):
        raise UserError(f"{name}.critic_warmup: lasts all {training.steps} steps, so no policy is trained; lower it")
    settings.log.check_steps(training.steps)
    settings.optimizer.check_steps(training.updates)
    if settings.critic_kind is not None and settings.critic.optimizer is not None:
        settings.critic.optimizer.check_steps(training.updates, "critic.optimizer")
    if settings.model.dropout:
        raise UserError("model.dropout: must be 0, in sampling and in training (detail P4)")
    if settings.critic_kind == "adapters" and settings.model.lora is None:
        raise UserError(
            "critic.kind: a critic of kind adapters uses frozen weights of the actor, and without model.lora there are "
            "none; give model.lora, or another kind"
        )
    settings.model.check_hydra(settings.reference.kind)
    setup.check_lora_compared(settings)
    if settings.average is not None and settings.model.lora is not None and settings.model.lora.quantization != "none":
        raise UserError("average: is of a model in fp32, and model.lora.quantization holds one in 4 bits; remove one")
    length = settings.longest_row
    if algorithm.fixed_length and settings.sampler.stop_at_eos:
        raise UserError(
            f"{name}.score_position: 'last' is the last token of the fixed length, but sampler.stop_at_eos ends "
            "responses before; use last_valid, or stop_at_eos: false"
        )
    draw = settings.sampler
    if algorithm.all_tokens and (draw.greedy or draw.top_k or draw.top_p < 1):
        raise UserError(
            f"sampler: {name} with these options needs responses sampled from all tokens, and top_k, top_p or greedy "
            "leave some out; remove them, or change the temperature instead"
        )
    scoring.check_patience(settings.scoring, training.batch_size // data_size, settings.job.hang_minutes)
    start = setup.find(settings, length=length, key="prompts.length + sampler.response_length", role="actor")
    if start.resume_from is not None:
        read_progress(start.resume_from, settings.algorithm, algorithm)
        check_head(settings, start.resume_from)
    memory.check_sizes(
        start.architecture, sizes, dtype=settings.model.dtype, length=length, rows=training.batch_size // data_size,
        micro_batch_tokens=settings.micro_batch_tokens,
        sampled=min(settings.sampler.least_slots, training.batch_size // data_size),
    )  # fmt: skip
    sampler.check_sampling(
        settings.sampler,
        start.architecture,
        prompt_length=settings.prompts.length,
        eos_id=start.tokenizer.eos_id,
        pad_id=start.architecture.vocab_size,
    )
    others = [("reference", settings.reference.checkpoint, "actor")]
    if settings.critic_kind is not None:
        others.append(("critic", settings.critic.checkpoint, "reward"))
    found = [
        setup.find_fitting(start, path, f"{section}.checkpoint", role=role, model=f"{section} model")[1]
        for section, path, role in others
        if path is not None
    ]
    origin = start.source
    if settings.reference.checkpoint is not None:
        origin = find_model(settings.reference.checkpoint, "actor")
    if start.resume_from is not None:
        key = "model.checkpoint" if settings.reference.checkpoint is None else "reference.checkpoint"
        weights = weights_of(origin, settings.seed)
        found.append(check_resumed(start.resume_from, origin, weights, key))
    notes = scoring.check_sources(
        settings.scoring,
        start.tokenizer,
        sizes,
        vocab_size=start.architecture.vocab_size,
        prompt_length=settings.prompts.length,
        response_length=settings.sampler.response_length,
    )
    records = scoring.RecordCheck(settings.scoring)
    prompts, report = load_prompts(start.tokenizer, settings.prompts, check_record=records, cache=start.cache)
    held_out, more = evaluation.check(settings, start, world_size, prompts)
    notes, ptx = [*filter(None, found), *notes, report.summary(), *more], None
    if settings.average is not None and not 0 < settings.average < 1:
        raise UserError(f"average: must be between 0 and 1, not {settings.average}")
    if settings.ptx is not None:
        if not algorithm.token_mean:
            raise UserError(f"ptx: text is added to a mean over tokens, so {name}.normalization must be token")
        if settings.ptx.batch_size % data_size:
            raise UserError(
                f"ptx.batch_size: {settings.ptx.batch_size} is not a multiple of {data_size} data-parallel ranks; "
                "change it or the ranks"
            )
        check_length(start.architecture, settings.ptx.data.max_length, "ptx.data.max_length")
        ptx, report = load_sft(settings.ptx.data.train, start.tokenizer, settings.ptx.data, cache=start.cache)
        notes.append(report.summary())

    def stopped(step_directory: Path) -> str | None:
        return evaluation.stopped(settings.evaluation, read_progress(step_directory, name, algorithm).best)

    return Plan(
        start=start, total_steps=training.steps, notes=tuple(notes), stopped=stopped, prompts=prompts,
        held_out=held_out, ptx=ptx, reference=origin,
    )  # fmt: skip


def check_head(settings: OnlineRunConfig, step_directory: Path) -> None:
    """Refuse (UserError) to go on with another kind of value head than the step directory holds."""
    if settings.critic_kind is None:
        return
    directory = step_directory / ("actor" if settings.critic_kind == "shared" else "critic")
    weights = checkpoint.inspect(directory)
    saved = "mlp" if "value_head.hidden_weight" in weights else "linear"
    if "value_head.weight" in weights and saved != settings.critic.head:
        raise UserError(
            f"critic.head: is {settings.critic.head}, and {directory} has a head of the kind {saved}; set that, or "
            "give a new run directory"
        )


def read_progress(step_directory: Path, name: str, algorithm: OnlineAlgorithm) -> Progress:
    """The loop's state in a step directory, as this algorithm continues with it. Raises UserError for a state that was
    not saved by this algorithm."""
    state = checkpoint.read_state(step_directory)
    saved, where = state.get("progress"), str(step_directory / checkpoint.STATE)
    if not isinstance(saved, dict) or saved.get("step") != state["step"] or not saved.keys() & {"state", "kl_coef"}:
        raise UserError(f"{where}: its 'progress' is not that of an online run, or damaged; use another step directory")
    if "kl_coef" in saved:  # a checkpoint from when PPO was the only algorithm
        saved = {"step": state["step"], "drawn": state["step"], "refused": saved.get("refused", 0),
                 "state": {"kl_coef": saved["kl_coef"]}}  # fmt: skip
    progress = config.from_dict(Progress, saved, where)
    if progress.algorithm != name:
        raise UserError(
            f"{where}: was saved by {progress.algorithm}, and the configuration asks for {name}; give a new run "
            "directory, with this run as model.checkpoint"
        )
    return replace(progress, state=algorithm.restore(algorithm.state | progress.state))


def prepare(settings: OnlineRunConfig, plan: Plan, topology: Topology) -> Prepared:
    """Build and load. Collective."""
    algorithm = settings.value
    models, progress = assemble(settings, algorithm, plan, topology)
    sizes, directory = settings.training, Path(settings.run)
    rows = audit.rows_of(settings)

    def loop(checkpoints, log, write_files):
        if topology.rank == 0:
            audit.save(rows, directory / "audit.json", audit.BUILT_IN if settings.algorithm == "ppo" else ())
            rate, slots = job_checks.matmul_rate(), models.sampler.slots_of_a_stage
            phases = work.online_step(settings, plan.start.architecture, topology.data_size, slots=slots)
            said = planned.seconds(settings, topology.world_size, rate=rate, slots=slots)
            work.save(phases, rate * topology.world_size, said, directory / "work.json")
        online.train(
            algorithm, models, progress, settings=settings, checkpoints=checkpoints, log=log, write_files=write_files
        )

    steps = f"{sizes.steps} of {sizes.batch_size} responses, {sizes.epochs} epochs of {sizes.minibatches} updates"
    banner, notes = {"algorithm": settings.algorithm, "steps": steps}, tuple(audit.table(rows, settings))
    own = partial(record, source=plan.reference, weights=weights_of(plan.reference, settings.seed))
    return Prepared(models.saved, progress.step, loop, banner, notes, own)


def assemble(
    settings: OnlineRunConfig, algorithm: OnlineAlgorithm, plan: Plan, topology: Topology
) -> tuple[Models, Progress]:
    """The models, built and loaded, with the sampler and the scorer. Collective."""
    from megarlhf.models import lora
    from megarlhf.models.build import build

    start, updates, critic_kind = plan.start, settings.training.updates, settings.critic_kind
    shared = critic_kind == "shared"
    trains = setup.model_options(settings, trains=True, total_steps=updates)
    frozen = setup.model_options(settings, trains=False, total_steps=updates)
    role = "actor_critic" if shared else "actor"
    mlp = critic_kind is not None and settings.critic.head == "mlp"
    actor = build(role, start.architecture, topology, **trains, mlp_values=mlp)
    actor.replays = settings.replay_experts and start.architecture.num_experts is not None
    hydra = settings.reference.kind == "hydra"
    bare = settings.model.lora is not None and settings.reference.checkpoint is None  # the actor without its adapters
    reference = None if hydra or bare else build("reference", start.architecture, topology, **frozen)
    critic = None
    own = {"optimizer": settings.critic.optimizer} if critic_kind and settings.critic.optimizer else {}
    build_critic = partial(build, "critic", start.architecture, topology, **(trains | own), mlp_values=mlp)
    if critic_kind == "separate":
        critic = build_critic()
    progress = Progress(settings.algorithm, state=algorithm.state)
    new_head = ("value_head.",)
    origin = plan.reference
    if reference is not None and origin is not None:
        adapters.load(reference, origin)

    def branch_off(policy: Engine) -> None:  # the reference of the policy's own weights
        nonlocal reference
        if hydra:
            reference = Hydra(policy, settings.model.trained_layers)
        else:
            reference = lora.Reference(policy, started=settings.model.lora.checkpoint is not None)

    setup.load(
        actor, settings, start, "actor", source=origin if hydra else None, fresh=new_head if shared else (),
        started=branch_off if reference is None else None,
    )  # fmt: skip
    if critic_kind == "adapters":
        critic = build_critic(trunk=actor)  # as loaded
        if start.resume_from is not None:
            adapters.check_resumed(critic.base, start.resume_from / "critic")
            checkpoint.load(critic, start.resume_from / "critic", weights_only=False)
    elif critic is not None:
        given = settings.critic.checkpoint  # a reward model, whose head is linear
        setup.load(
            critic, settings, start, "critic", source=find_model(given, "reward") if given else None,
            fresh=() if given and not mlp else new_head,
        )  # fmt: skip
    if start.resume_from is not None:
        if hydra:
            reference.check_trunk(start.resume_from)
        progress = read_progress(start.resume_from, settings.algorithm, algorithm)
    if settings.reference.on_host:
        reference.keep_on_host("weights")
    if critic is not None and settings.critic.on_host:
        critic.keep_on_host("weights")

    average = None
    if settings.average is not None:
        options = frozen | {"dtype": "fp32", "adapters": settings.model.lora}
        average = build(role, start.architecture, topology, **options, mlp_values=mlp)
        average.base = actor.base
        average.follow(actor, 0.0)
        if start.resume_from is not None:
            checkpoint.load(average, start.resume_from / "average", weights_only=True)
    share = settings.training.batch_size // topology.data_size
    scorer = scoring.build_scorer(
        settings.scoring, topology, start.tokenizer, micro_batch_tokens=settings.micro_batch_tokens,
        dtype=settings.model.dtype, records=plan.prompts.records,
    )  # fmt: skip
    policy_sampler = Sampler(  # after all models: its slots take the memory that is left
        actor, settings.sampler, rows=share, prompt_length=settings.prompts.length, seed=settings.seed,
        eos_id=start.tokenizer.eos_id, record_experts=actor.replays,
    )  # fmt: skip
    greedy = None
    if algorithm.greedy:
        draw = replace(settings.sampler, samples_per_prompt=1, greedy=True)
        greedy = Sampler(actor, draw, rows=share, prompt_length=settings.prompts.length, eos_id=start.tokenizer.eos_id)
    models = Models(
        actor=actor,
        critic=critic,
        reference=reference,
        sampler=policy_sampler,
        scorer=scorer,
        prompts=PromptLoader(
            plan.prompts,
            length=settings.prompts.length,
            global_batch=settings.training.batch_size // settings.sampler.samples_per_prompt,
            pad_id=policy_sampler.pad_id,
            dp_rank=topology.data_rank,
            dp_size=topology.data_size,
            seed=settings.seed,
        ),
        evaluation=evaluation.Evaluation(settings, plan.held_out, actor, scorer, eos_id=start.tokenizer.eos_id),
        text=None if plan.ptx is None else Pretraining(
            Loader(
                plan.ptx,
                global_batch=settings.ptx.batch_size,
                dp_rank=topology.data_rank,
                dp_size=topology.data_size,
                seed=settings.seed,
                pad_id=start.tokenizer.pad_id,
            ),
            settings.ptx.coef,
        ),
        average=average,
        greedy=greedy,
    )  # fmt: skip
    models.scorer.load_state(progress.scorer)
    return models, progress


def _program(default: str | None) -> Program[OnlineRunConfig, Plan]:
    names = ALGORITHMS if default is None else (default,)
    read = partial(load, default=default)
    return Program(tuple(map(run_config, names)), read, check, training(prepare))


PROGRAM = _program(None)
PPO = _program("ppo")
