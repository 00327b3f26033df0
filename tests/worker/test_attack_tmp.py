import asyncio, math, json
from pathlib import Path
import pytest
from tests.worker.conftest import following, learner
from tests.worker.groups import group, trajectory
from tests.worker.test_sft_job import examples
from headrace.core.models import create_model
from headrace.core.store import open_store, fetch_folder
from headrace.producers import TrajectoryProducer
from headrace.schemas.chat import *
from headrace.schemas.events import *
from headrace.schemas.jobs import JobState, JobDocument
from headrace.schemas.state import *
from headrace.schemas.training import *
from headrace.schemas.trajectory import *

def G(name, *ts): return TrajectoryGroup(trajectories=list(ts), group_id=name)
def sz(step): return len(step.model_dump_json())

async def job(seen, producer, groups, config=None, n=None, **kw):
    before = len(seen.of(JobStateChanged))
    try:
        jid = await producer.submit_job(groups, config, **kw)
    except Exception as e:
        print("   PRODUCER", type(e).__name__, str(e)[:200]); return None
    for _ in range(600):
        ev = [e for e in seen.of(JobStateChanged) if e.job_id == jid]
        if ev and ev[-1].state in (JobState.COMPLETED, JobState.FAILED): break
        await asyncio.sleep(0.05)
    else:
        print("   !!!! NEVER ENDED"); return None
    st = [s for s in seen.of(StepRecord) if s.job_id == jid]
    print("   ", ev[-1].state.name, ev[-1].message, [(s.updates, s.loss, s.groups, s.refusals, s.trajectory_refusals, sz(s)) for s in st])
    for e in seen.of(GroupRejected)+seen.of(TrajectoryRejected):
        if e.job_id == jid if hasattr(e,'job_id') else False: print("      ", type(e).__name__, e.group_id, e.reason, e.detail[:150])
    return st[0] if st else None

async def test_a(shared, tmp_path):
    model = await learner(shared, "attack")
    T = trajectory
    async with following(shared, model.model_id) as seen, TrajectoryProducer(shared, model_id=model.model_id) as p:
        cases = dict(
          one=[G("one", T(1.0,[9,10]))], thousand=[G("thousand", *[T(i/7 % 3, [9+i%8, 10+i%5, 1]) for i in range(1000)])],
          same=[G("same", T(1.0,[9,10,11]), T(0.0,[9,10,11]), T(0.5,[9,10,11]))], prefix=[G("prefix", T(1.0,[9,10]), T(0.0,[9,10,11,12]))],
          empty=[G("empty", T(1.0,[]), T(0.0,[9]))], allempty=[G("allempty", T(1.0,[]), T(0.0,[]))], big=[G("big", T(1e308,[9]), T(-1e308,[10]))], den=[G("den", T(5e-324,[9]), T(0.0,[10]))],
          edge=[G("edge", T(1.0,[31,0]), T(0.0,[0,31]))], over=[G("over", T(1.0,[32,0]), T(0.0,[0,31]), T(2.0,[1]))], neg=[G("neg", T(1.0,[-1,0]), T(0.0,[0,31]), T(2.0,[1]))],
        )
        for k, gs in cases.items():
            print(k); await job(seen, p, gs)
        print("allnan"); 
        def nan(r, toks, lp):
            c = Choice(finish_reason="stop", message=ChoiceMessage(content="a"), token_ids=toks, token_logprobs=lp, prompt_token_ids=[2,7,8])
            return Trajectory(messages_and_choices=[Message(role="user", content="a b"), c], reward=r, initial_policy_version=0, final_policy_version=0)
        await job(seen, p, [G("nan1", nan(1.0,[9,10],[math.nan]*2), nan(0.0,[9,11],[math.nan]*2))])
        await job(seen, p, [G("nan2", nan(1.0,[9,10],[math.nan]*2), nan(0.0,[9,11],[math.nan]*2))], TrainConfig(allow_training_without_logprobs=True))
        await job(seen, p, [G("nan3", nan(1.0,[9,10],[-1,math.nan]), nan(0.0,[9,11],[-math.inf,-9999]))], TrainConfig(allow_training_without_logprobs=True, kl_penalty_coef=.1, kl_penalty_source="sample"))
        await job(seen, p, [G("nan4", nan(1.0,[9,10],[-1,1e308]), nan(0.0,[9,11],[5.0,-0.0]))])
        await job(seen, p, [G("nan5", nan(1.0,[9,10],None), nan(0.0,[9,11],[-1,-2]))], TrainConfig(allow_training_without_logprobs=True))
        lim = 512
        print("limits")
        for n in (500,):
            await job(seen, p, [G(f"lim{n}", T(1.0,[9]*n), T(0.0,[10]*5))])
        for c in (dict(packed_sequence_length=8), dict(packed_sequence_length=9), dict(advantage_balance=1), dict(loss_aggregation="constant_norm", loss_aggregation_constant=0.001), dict(kl_penalty_coef=.1, kl_penalty_step_lag=10**9), dict(kl_penalty_coef=.1, kl_penalty_reference_step=10**9), dict(grad_accumulation_sequences=1, packed_sequence_length=12), dict(logprob_calculation_chunk_size=1), dict(kl_penalty_coef=.1, kl_ref_adapter_path=shared.store.url), dict(kl_penalty_coef=.1, kl_ref_adapter_path=shared.store.url+"/missing"), dict(kl_penalty_coef=.1, kl_ref_adapter_path=shared.store.url+"/a\\b"), dict(kl_penalty_coef=.1, kl_ref_adapter_path=shared.store.url+"/"+"x"*300), dict(kl_penalty_coef=.1, kl_ref_adapter_path="s3://nobucket/x"), dict(scale_learning_rate_by_reward_std_dev=True, num_trajectories_learning_rate_multiplier_power=4)):
            try: cfg = TrainConfig(**c)
            except Exception as e: print(c, "DOOR", str(e)[:150]); continue
            print(c); await job(seen, p, [group("g"+json.dumps(c)[:100])], cfg)
        st = await job(seen, p, [group("plots"), group("p2", seed=3)], TrainConfig(plot_tensors=True))
        fetch_folder(open_store(shared.store.url, shared.s3), st.plots.uri, st.plots.digest, Path("/tmp/attack/plots"))
        print(sorted(st.metrics))

async def test_sft(shared):
    model = await learner(shared, "attack sft")
    async with following(shared, model.model_id) as seen, TrajectoryProducer(shared, model_id=model.model_id) as p:
        await job(seen, p, [group("r1")])
        await job(seen, p, [examples("e1", "c d")], sft=SftConfig())
        await job(seen, p, [group("r2", version=2)])
        await job(seen, p, [examples("e2", "")], sft=SftConfig())
        await job(seen, p, [examples("e2b", "", "c")], sft=SftConfig())
        await job(seen, p, [], sft=SftConfig())
        await job(seen, p, [])
        user_only = TrajectoryGroup(group_id="uo", trajectories=[Trajectory(messages_and_choices=[Message(role="user", content="a")])])
        await job(seen, p, [user_only], sft=SftConfig())
        img = TrajectoryGroup(group_id="im", trajectories=[Trajectory(messages_and_choices=[Message(role="user", content=[{"type":"image_url","image_url":{"url":"data:,"}},{"type":"text","text":"a"}]), Message(role="assistant", content="c d")])])
        await job(seen, p, [img], sft=SftConfig())
        tools = TrajectoryGroup(group_id="to", trajectories=[Trajectory(messages_and_choices=[Message(role="user", content="a"), Message(role="assistant", content=None, tool_calls=[{"id":"x","type":"function","function":{"name":"a","arguments":"{}"}}]), Message(role="tool", content="b", tool_call_id="x"), Message(role="assistant", content="c d")], tools=[{"type":"function","function":{"name":"a","parameters":{}}}])])
        await job(seen, p, [tools], sft=SftConfig())
        await job(seen, p, [examples("e9", *["c d e"]*50)], TrainConfig(plot_tensors=True, kl_penalty_coef=1, kl_penalty_reference_step=99, packed_sequence_length=8), sft=SftConfig(epochs=2, batch_size=7))
        await job(seen, p, [examples("e10", *["c d"]*5)], TrainConfig(plot_tensors=True), sft=SftConfig(epochs=100, batch_size=1))

async def test_lora(shared):
    S = lambda **k: ModelSettings(base_model="tiny", adaptation="lora", batch=BatchPolicy(groups_per_step=1), train=TrainConfig(learning_rate=1e-2), optimizer=OptimizerSettings(max_grad_norm=1.0), **k)
    bad = await create_model(shared, project="tests", name="bad targets", model=S(lora=LoraSettings(target_modules=("nope",))))
    good = await create_model(shared, project="tests", name="good one", model=S(lora=LoraSettings(r=4)))
    other = await create_model(shared, project="tests", name="other rank", model=S(lora=LoraSettings(r=8, alpha=64)))
    steps = {}
    for m in (bad, good, other, bad, good):
        async with following(shared, m.model_id) as seen, TrajectoryProducer(shared, model_id=m.model_id) as p:
            print(m.name); steps[m.name] = await job(seen, p, [group("g")])
    async with following(shared, good.model_id) as seen, TrajectoryProducer(shared, model_id=good.model_id) as p:
        print("other rank ref"); await job(seen, p, [group("k1")], TrainConfig(kl_penalty_coef=.1, kl_ref_adapter_path=steps["other rank"].weights.uri))
        root = Path(shared.store.url.removeprefix("file://"))
        src = Path(steps["good one"].weights.uri.removeprefix("file://"))
        for name, cut in (("trunc", 50), ("empty", 0)):
            d = root/"adapters"/name; d.mkdir(parents=True)
            (d/"adapter_config.json").write_bytes((src/"adapter_config.json").read_bytes())
            (d/"adapter_model.safetensors").write_bytes((src/"adapter_model.safetensors").read_bytes()[:cut])
            print(name); await job(seen, p, [group("k"+name)], TrainConfig(kl_penalty_coef=.1, kl_ref_adapter_path=shared.store.url+"/adapters/"+name))
        d = root/"adapters"/"noconf"; d.mkdir(parents=True); (d/"adapter_model.safetensors").write_bytes(b"x")
        print("noconf"); await job(seen, p, [group("kn")], TrainConfig(kl_penalty_coef=.1, kl_ref_adapter_path=shared.store.url+"/adapters/noconf"))
        print("fixed"); await job(seen, p, [group("kf")], TrainConfig(kl_penalty_coef=.1, kl_ref_adapter_path=steps["good one"].weights.uri+"/"))
        print("file"); await job(seen, p, [group("kff")], TrainConfig(kl_penalty_coef=.1, kl_ref_adapter_path=steps["good one"].weights.uri+"/adapter_model.safetensors"))
