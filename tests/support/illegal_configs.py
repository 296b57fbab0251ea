"""Configs that must be refused, and the smallest one that is accepted."""

from collections.abc import Iterator

from pydantic.fields import FieldInfo

from slipstream.config.file import fields

BASE = """
student = "builtin:student"
updates = 2
output = "run"
[teachers.main]
model = "builtin:teacher"
[data]
train = "builtin:arithmetic"
limit = 24
[sampler]
max_tokens = 16
[learner]
batch_size = 8
[runtime]
kind = "inline"
device = "cpu"
"""
RL = "loss.weight=0 teachers={} policy.loss=vanilla task.reward=exact sampler.group=4"
"""Rewards alone."""
BOTH = "policy.loss=vanilla task.reward=exact sampler.group=4"
ILLEGAL = f"""
data.order=curriculum
data.order=curriculum data.curriculum.column=level data.shuffle=false
data.order=curriculum data.curriculum.column=level
data.order=adaptive
data.order=adaptive data.adaptive.weight_by=kl data.shuffle=false
{RL} data.order=adaptive data.adaptive.weight_by=kl
data.curriculum.column=level
data.curriculum.epochs=0.5
data.adaptive.uniform_share=0.5
data.adaptive.half_life=3.0
data.adaptive.weight_by=kl
data.weights={{a=1.0}}
data.weights_temperature=2.0
data.train={{a="builtin:arithmetic",b="builtin:arithmetic"}} data.weights={{a=1.0}}
data.train={{a="builtin:arithmetic",b="builtin:arithmetic"}} data.weights={{a=1.0,b=0.0}}
data.train={{a="builtin:arithmetic",b="builtin:arithmetic"}} data.weights={{a=1.0,c=1.0}}
data.train={{a="builtin:arithmetic",b="missing.jsonl"}}
data.train={{}}
data.too_long=skip sampler.max_length=17
data.where={{level=[]}}
data.where={{level=3}}
environment.use=table environments.a.use=table
data.train=builtin:table environments.a.use=table
data.train={{a="builtin:table"}} environments.a.use=table environments.b.use=lookup
data.train={{a="builtin:table"}} environments.a.use=table environments.a.turn_tokens=16
data.train={{a="builtin:table"}} environments.a.sandbox="none" environments.a.gateway.listen=127.0.0.1:8008
environments.a-b.use=table
mix.share=0.5 loss.kind=forward_kl environments.a.use=table
eval.suite.tasks=gsm8k eval.suite.every=5
eval.suite.tasks=gsm8k
eval.suite.tasks=[] eval.suite.every=5
eval.suite.tasks=gsm8k eval.suite.every=5 checkpoint.minutes=0
eval.suite.tasks=gsm8k eval.suite.every=5 runtime.clock=modelled
environment.use=reasoning_gym:chain_sum
environment.use=mcp:
environment.use=mcp:no-such-program
environment.use=verifiers:
environment.use=verifiers:no_such_taskset
data.eval=none eval.every=0 data.eval_where={{level=3}}
policy.refill=2.0
{BOTH} policy.refill=2.0
{RL} policy.refill=2.0 policy.advantage=reinforce_plus_plus
{RL} policy.refill=2.0 reference.weight=0.1 reference.into=reward
{RL} policy.refill=1.2
loss.tokens=tcod_f2b
loss.tokens=turn_opd
learner.lora.targets=[]
loss.tokens=middle
loss.tokens=iw_opd sampler.fusion={{alpha=0.5}}
loss.tokens=iw_opd sampler.teacher_replaces=5 loss.kind=forward_kl
sft.updates=1 sft.source=teacher sft.loss.kind=forward_kl sft.loss.tokens=iw_opd
loss.kind=reverse_kl_topk loss.detach_mass=true
loss.kind=reverse_kl_topk loss.detach_mass=true loss.renormalise=false loss.tail=true
loss.kind=reverse_kl_topk loss.detach_mass=true loss.renormalise=false loss.reweight=false
{RL} policy.loss=reinforce policy.centre=top_k sampler.engine=server sampler.base_url="http://127.0.0.1:9"
loss.tokens=first loss.token_options={{rate=1.0}}
loss.tokens=first loss.token_options={{share=0.0}}
loss.token_options={{share=0.5}}
sft.updates=1 sft.loss.tokens=iw_opd
{BOTH} policy.centre=draws
{RL} policy.centre_size=4
{RL} policy.loss=reinforce policy.centre=top_k policy.centre_size=1000
{RL} policy.loss=reinforce policy.centre=draws correction.preset=bypass_pg_is
{RL} policy.loss=reinforce policy.centre=draws correction.preset=decoupled_token_is
{RL} policy.loss=reinforce policy.centre=draws correction.preset=bypass_pg_token_icepop correction.is_normalize=true
{RL} policy.loss=reinforce policy.centre=top_k sampler.top_k=5 sampler.keep_mask=true
{RL} policy.loss=reinforce policy.centre=support
{RL} policy.loss=reinforce policy.centre=support sampler.top_k=5 sampler.keep_mask=true sampler.engine=vllm
{RL} policy.loss=reinforce policy.centre=support sampler.top_k=5 sampler.keep_mask=true freshness.anchor=0.1
{RL} policy.loss=reinforce policy.centre=support sampler.top_p=0.9 sampler.keep_mask=true
{RL} policy.loss=reinforce policy.centre=support policy.centre_size=4 sampler.top_k=5 sampler.keep_mask=true
{RL} policy.loss=reinforce policy.centre=support sampler.top_k=1000 sampler.keep_mask=true
{RL} policy.loss=reinforce policy.centre=draws correction.rs={{token_k1=[0.8,1.25]}}
{BOTH} policy.loss=reinforce policy.centre=draws loss.m=1
{BOTH} policy.loss=reinforce policy.centre=draws policy.centre_size=4
{BOTH} policy.loss=reinforce policy.centre=top_k freshness.anchor=0.1
{BOTH} policy.loss=reinforce policy.centre=draws mix.source=data
policy.drop_alike=true
{BOTH} policy.drop_alike=true
{RL} policy.drop_alike=true policy.advantage=remax
{RL} policy.drop_alike=true reference.weight=0.1 reference.into=reward
{RL} policy.drop_alike=true policy.advantage=grpo_turn environment.use=table task.reward=environment
{RL} policy.loss=a3po policy.options={{lag=2.0}}
{RL} policy.loss=a3po correction.preset=decoupled_token_is
{RL} policy.loss=oapl policy.options={{beta=0.1}}
{RL} policy.loss=oapl correction.preset=decoupled_geo_rs
{RL} policy.loss=oapl policy.old=previous
{RL} policy.loss=vespo sampler.top_p=0.9
sft.updates=2
sft.updates=3
loss.weight=0 sft.updates=2
loss.weight=0 teachers={{}} sft.updates=2 mix.share=0.5
loss.weight=0 sft.updates=2 sft.loss.kind=forward_kl sft.until=0.5
{RL} sft.updates=2
sft.updates=1 sft.warmup=2
sft.updates=1 sft.loss.kind=reverse_kl_mc
sft.updates=1 sft.loss.kind=reverse_kl_topk
sft.updates=1 sft.loss.kind=k2
sft.updates=1 sft.loss.weight=0.5
sft.updates=1 sft.loss.kind=forward_kl sft.loss.k=1000
sft.updates=1 sft.loss.k=4
sft.updates=1 sft.source=file
sft.updates=1 sft.path=x.jsonl
sft.updates=1 sft.cache=drawn
sft.updates=1 sft.source=teacher sft.cache=levels.jsonl
sft.updates=1 sft.source=file sft.path=missing.jsonl
sft.updates=1 sft.source=file sft.path=levels.jsonl
sft.updates=1 sft.until=0.9
sft.updates=1 sft.until=0.9 sft.loss.kind=jsd
sft.updates=1 sft.until=0.9 sft.loss.kind=forward_kl sft.loss.cache=hidden
schedule.kind=sync sampler.on_publish=reuse
schedule.on_publish=drain sampler.on_publish=reuse
sft.updates=1 sft.until=1 sft.loss.kind=forward_kl
sft.updates=1 reference.weight=0.1
sft.updates=1 data.train=table.csv data.prompt=question
sft.updates=1 data.train=table.csv data.prompt=question data.response=nothing
sft.updates=1 sft.source=teacher data.response=solution
sft.updates=1 sft.source=teacher teachers.main.base_url=http://127.0.0.1:1/v1 loss.kind=forward_kl
sft.updates=1 sft.source=teacher teachers.main.engine=vllm
sft.updates=1 sft.source=teacher teachers.main.ends=map
sft.updates=1 sft.source=teacher teachers.main.model=self teachers.main.context={{prompt}}{{ground_truth}}
sft.updates=1 sft.loss.kind=jsd teachers.main.base_url=http://127.0.0.1:1/v1 loss.kind=forward_kl
{RL} sft.updates=1 sft.source=teacher
{RL} sft.updates=1 sft.loss.kind=forward_kl
data.response=answer
loss.kind=cross_entropy
mix.share=0.5
mix.share=0 loss.kind=forward_kl
mix.share=2 loss.kind=forward_kl
mix.share=0.5 mix.final=0.5 loss.kind=forward_kl
mix.over=1 loss.kind=forward_kl
mix.path=x.jsonl loss.kind=forward_kl
mix.source=file loss.kind=forward_kl
mix.source=file mix.path=missing.jsonl loss.kind=forward_kl
mix.source=file mix.path=levels.jsonl loss.kind=forward_kl
mix.source=file mix.path=levels.jsonl loss.m=2
mix.source=teacher mix.prefix=0.5
mix.prefix=1.0
mix.source=teacher loss.kind=reverse_kl_topk loss.k=4
mix.source=teacher loss.importance=false
mix.source=teacher loss.kind=k2
mix.source=teacher sampler.top_k=5 sampler.keep_mask=true
mix.source=teacher freshness.weight=freshness
mix.source=teacher guards.gac.every=1
mix.source=teacher correction.preset=bypass_pg_geo_rs
{RL} mix.source=file mix.path=missing.jsonl
mix.share=0.5 loss.kind=forward_kl sampler.group=2
mix.share=0.5 loss.kind=forward_kl environment.use=table
sampler.quantisation=int4
sampler.quantisation=int8 sampler.engine=vllm
sampler.quantisation=fp8 learner.lora.rank=4
learner.quantised=true
learner.perturbation.std=0.01
{RL} learner.perturbation.std=0.01 learner.ranks=2
{RL} learner.perturbation.std=0.0
{RL} policy.loss=gspo learner.perturbation.std=0.01 environment.sandbox="none" environment.gateway.command=ls
learner.lora.rank=4 learner.dtype=bfloat16
learner.dtype=float16
learner.optimizer_dtype=float16
learner.dtype=float64 learner.compute_dtype=float16
sampler.speculation.lookup=0
sampler.speculation.least=1
sampler.speculation.tokens=4 sampler.max_tokens=2
sampler.speculation.tokens=4 sampler.engine=vllm
sampler.speculation.tokens=4 runtime.clock=modelled
sampler.engine=vllm sampler.engine_args.speculative_config.method=ngram
sampler.fusion.alpha=0.0
sampler.fusion.alpha=0.02
sampler.fusion.alpha=0.5 {BOTH} policy.loss=reinforce correction.preset=bypass_pg_geo_rs
sampler.fusion.alpha=0.5 sampler.teacher_replaces=3
sampler.fusion.alpha=0.5 freshness.weight=freshness
sampler.fusion.alpha=0.5 sampler.fusion.difficulty=true
sampler.fusion.alpha=0.5 {BOTH} policy.loss=reinforce
sampler.fusion.alpha=0.5 loss.kind=reverse_kl_topk loss.k=4
sampler.fusion.alpha=0.5 schedule.kind=async schedule.tau=auto
sampler.teacher_replaces=-1
sampler.teacher_replaces=1000000
{RL} sampler.teacher_replaces=3
sampler.teacher_replaces=3 teachers.other.model=builtin:teacher
sampler.teacher_replaces=3 sampler.top_k=5 loss.importance=false
sampler.teacher_replaces=3 sampler.top_k=5 sampler.keep_mask=true
sampler.teacher_replaces=3 {BOTH}
sampler.teacher_replaces=3 freshness.weight=freshness
sampler.teacher_replaces=3 loss.kind=forward_kl environment.use=table
sampler.teacher_replaces=3 correction.preset=bypass_pg_geo_rs
sampler.teacher_replaces=3 schedule.kind=async schedule.tau=2 guards.gac.every=1
sampler.teacher_replaces=3 runtime.clock=modelled
sampler.teacher_replaces=3 schedule.kind=async schedule.tau=2 guards.kl.high=0.1
sampler.teacher_replaces=3 schedule.kind=async schedule.tau=2 guards.ess.target=0.5
sampler.teacher_replaces=3 schedule.kind=async schedule.tau=auto
sampler.teacher_replaces=3 teachers.main.devices=2
sampler.teacher_replaces=3 loss.kind=reverse_kl_topk loss.k=4
sampler.teacher_replaces=3 loss.importance=false
sampler.teacher_replaces=3 loss.kind=k2
sampler.teacher_replaces=3 loss.kind=forward_kl teachers.main.base_url=http://127.0.0.1:1/v1
sampler.teacher_replaces=3 teachers.main.engine=vllm
sampler.teacher_replaces=3 sampler.engine=vllm
sampler.teacher_replaces=3 teachers.main.ends=map
sampler.teacher_replaces=3 teachers.main.context={{prompt}}{{ground_truth}}
loss.kind=forward_kl loss.tail=true loss.renormalise=true
loss.kind=forward_kl loss.cache=hidden loss.tail=true
loss.kind=forward_kl loss.cache=hidden loss.renormalise=true
loss.kind=forward_kl loss.k=1000
loss.kind=jsd loss.cache=teacher_topk loss.k=1000
loss.kind=jsd loss.beta=2
loss.kind=eopd loss.k=4
loss.kind=eopd loss.cache=teacher_topk loss.k=1000
loss.kind=mopd loss.k=1000
loss.kind=mopd loss.tail=true
loss.reward_scale=0
loss.kind=forward_kl loss.m=4
loss.kind=reverse_kl loss.k=4
loss.kind=k1
loss.kind=kl
loss.kind=k2 loss.clip=0.2
loss.kind=k2 loss.dual_clip=3.0
loss.kind=k2 loss.policy=cispo
loss.kind=k2 loss.use=advantage loss.policy=sapo loss.clip=0.1
loss.kind=k2 loss.use=advantage loss.policy=cispo loss.dual_clip=3.0
{BOTH} policy.old_decay=0.5
{BOTH} policy.variance_target=0.1
{BOTH} policy.loss=r2vpo policy.variance_step=2.0
{BOTH} policy.loss=r2vpo policy.variance_target=0.0
{BOTH} policy.loss=quatro policy.options={{spread=1.0}}
{BOTH} policy.loss=quatro policy.options={{radius=0.0}}
{BOTH} policy.options={{clip_low=-0.1}}
{BOTH} policy.options={{dual_clip=nan}}
{BOTH} policy.options={{dual_clip=1.0}}
{BOTH} policy.loss=decoupled_ppo policy.options={{weight_cap=0.0}}
{BOTH} policy.loss=dppo_tv policy.options={{dppo_truncation=0.0}}
{BOTH} policy.loss=clip_cov policy.options={{cov_low=5.0}}
{BOTH} policy.loss=clip_cov policy.options={{cov_fraction=2.0}}
{BOTH} policy.loss=espo policy.options={{espo_share=0.0}}
{BOTH} policy.advantage=reinforce_plus_plus policy.advantage_options={{gamma=1.5}}
{BOTH} policy.loss=sapo policy.options={{tau_pos=0.0}}
{BOTH} policy.loss=sapo policy.options={{tau_neg=0.0}}
{RL} policy.loss=oapl policy.advantage=oapl policy.advantage_options={{beta=0.0}}
{RL} policy.old=average learner.dtype=bfloat16
{BOTH} policy.old=average correction.preset=bypass_ppo_clip_geo_rs
{RL} policy.old=average policy.loss=reinforce
{RL} policy.advantage=opob_exact learner.ranks=2 runtime.kind=local
{RL} policy.advantage=opob_exact correction.preset=decoupled_token_is
{RL} policy.advantage=opob_exact correction.preset=decoupled_seq_is_rs correction.rs={{token_k2=1.0}}
{RL} policy.old=average correction.preset=decoupled_token_is learner.snapshots=2
schedule.kind=sync guards.gac.limit=0.0
loss.kind=k2 loss.m=4
loss.kind=k1 loss.use=reward
loss.kind=k1 loss.use=advantage sampler.top_p=0.9
loss.kind=forward_kl loss.use=advantage
loss.kind=reverse_kl_topk loss.k=1000
loss.kind=reverse_kl_topk loss.tail=true
loss.kind=reverse_kl_topk sampler.top_k=5
loss.kind=reverse_kl_topk sampler.top_k=5 sampler.keep_mask=true
loss.kind=m2po sampler.min_p=0.1
loss.kind=m2po loss.clip=0.2
loss.kind=decoupled_ppo sampler.top_p=0.9
loss.kind=decoupled_ppo loss.ratio_cap=2.0
loss.kind=decoupled_ppo correction.preset=decoupled_token_is
loss.clip=0.2 loss.ratio_cap=2.0
loss.baseline=true loss.m=1
loss.baseline=true loss.clip=0.2
loss.importance=false loss.clip=0.2
loss.importance=false loss.ratio_cap=2
loss.importance=false loss.advantage=behavior
loss.clip=-0.1
loss.clip=[0.1,0.2,0.3]
loss.weight=0
loss.weight=0 teachers={{}}
loss.weight=0 policy.loss=vanilla task.reward=exact
teachers={{}}
policy.loss=vanilla
{BOTH} sampler.group=1
{BOTH} policy.loss=vanila
{BOTH} policy.options={{clip_hihg=0.2}}
{BOTH} policy.options={{generator=1}}
{BOTH} policy.loss=reinforce policy.options={{clip_low=0.1}}
{BOTH} policy.advantage=grop
{BOTH} policy.advantage_options={{nrom=false}}
{RL} policy.weight=0
{BOTH} policy.old=previous correction.preset=decoupled_token_is
{BOTH} policy.old=previous policy.loss=reinforce
{BOTH} correction.preset=bypass_ppo_clip policy.loss=reinforce
{BOTH} correction.preset=bypass_pg_is
{BOTH} correction.preset=decoupled_token
{BOTH} correction.preset=decoupled_geo_rs correction.is_threshold=2.0
{BOTH} correction.preset=decoupled_token_is correction.is_threshold=-1
{BOTH} correction.preset=decoupled_token_is correction.is_threshold=[3.0,2.0]
{BOTH} correction.preset=decoupled_token_is correction.rs={{token_k4=1.0}}
{BOTH} correction.preset=decoupled_token_is correction.rs={{token_k2=-1.0}}
{BOTH} correction.preset=decoupled_token_is correction.rs={{token_k1=[2.0,1.0]}}
{BOTH} correction.preset=decoupled_geo_rs correction.is_normalize=true
{BOTH} correction.is_normalize=true
{BOTH} correction.is_threshold=2.0
{BOTH} correction.rs={{token_k1=2.0}}
{BOTH} correction.is_level=token
{BOTH} correction.preset=decoupled_geo_rs correction.is_level=row
{BOTH} correction.preset=bypass_ppo_clip correction.is_level=token
{BOTH} correction.preset=decoupled_token_is correction.is_level=turn policy.loss=decoupled_ppo
{BOTH} correction.preset=decoupled_token_is correction.ctpo_clip=0.1
{BOTH} correction.preset=decoupled_geo_rs correction.ctpo_clip=0.1
{BOTH} correction.preset=decoupled_token_is correction.is_level=cumulative correction.ctpo_clip=0
{BOTH} correction.preset=decoupled_token_is correction.verl_compat=true
{BOTH} correction.preset=decoupled_seq_is_rs correction.verl_compat=true
{BOTH} correction.preset=decoupled_k3_rs correction.verl_compat=true
correction.preset=decoupled_geo_rs correction.is_level=geometric
{BOTH} policy.advantage=gae
{RL} critic.lr=0.01
critic.weight=0.1
{RL} policy.advantage=gae critic.warmup=2
{RL} policy.advantage=gae critic.warmup=50 updates=100
{RL} policy.advantage=gae policy.loss=reinforce policy.advantage_options={{rho=1.0}} critic.warmup=1 sampler.top_p=0.8
{RL} policy.advantage=gae critic.warmup=1 policy.advantage_options={{lam=1.5}}
{RL} policy.advantage=gae critic.warmup=1 policy.advantage_options={{by_turn=true}}
{RL} policy.advantage=grpo_turn
{RL} policy.advantage=gae policy.refill=2.0 critic.lr=0.01
{RL} policy.advantage=gae critic.lr=0.01 environment.sandbox="none" environment.gateway.command=ls
{RL} policy.advantage=gae critic.model=builtin:teacher critic.weight=0.2
{RL} policy.advantage=gae critic.model=builtin:teacher critic.dtype=float16
{RL} policy.advantage=gae critic.model=builtin:teacher critic.dtype=float64 learner.compute_dtype=bfloat16
{RL} policy.advantage=gae critic.model=builtin:teacher critic.dtype=bfloat16 learner.compute_dtype=float16
{RL} policy.advantage=gae critic.model=builtin:tool_teacher
{RL} policy.advantage=gae critic.model=builtin:word_student
{RL} policy.advantage=gae critic.model=builtin:pair_teacher
{RL} policy.advantage=gae critic.model=no/such
{RL} policy.advantage=gae critic.model=builtin:teacher critic.lora.rank=1000
{RL} policy.advantage=gae critic.model=builtin:teacher critic.lora.targets=["nothing"]
{RL} policy.advantage=gae critic.backbone_lr=0.01
{RL} policy.advantage=gae critic.dtype=bfloat16
{RL} policy.advantage=gae critic.lora.rank=2
{BOTH} policy.advantage=gdpo
{BOTH} policy.advantage=gdpo task.reward=["exact","math"] reference.weight=0.1 reference.into=reward
{BOTH} policy.advantage=gdpo task.reward=["exact","math"] sampler.group=1
{BOTH} policy.advantage=opob sampler.group=1
{BOTH} policy.advantage=optimal_token_baseline sampler.group=1
{BOTH} policy.advantage=optimal_token_baseline policy.advantage_options={{logp=1.0}}
{BOTH} policy.advantage=remax policy.advantage_options={{greedy_rewards=1.0}}
{BOTH} policy.reward_weights={{exact=2.0}}
{BOTH} task.reward=["exact","math"] policy.reward_weights={{maths=2.0}}
{BOTH} task.reward=["exact","math"] policy.reward_weights={{exact=0.0,math=0.0}}
{BOTH} task.reward=["exact","exact"]
task.reward=overlong
task.reward=overlong task.overlong.buffer=17
task.reward=exact task.overlong.buffer=4
task.reward=format task.format.pattern=(
task.reward=format task.format.tags=[]
task.reward=model
task.reward=model task.model.path=nowhere/at/all
task.reward=model task.model.path=builtin:student
task.reward=judge
task.reward=judge task.judge.base_url=http://j/v1 task.judge.model=m task.judge.prompt={{response}}
task.reward=judge task.judge.base_url=http://j/v1 task.judge.model=m task.judge.prompt=x task.judge.key=s
task.reward=format task.format.tags=["a"] task.format.pattern=a
task.reward=["exact","vibes"]
task.reward=false
runtime.kind=local sampler.replicas=100000
runtime.kind=inline runtime.restarts=1
reference.weight=0.1 reference.estimate=k4
reference.weight=0.1 reference.estimate=k1+
reference.weight=0.1 reference.importance=false reference.estimate=k1
{BOTH} reference.weight=0.1 reference.into=reward reference.importance=false
{BOTH} reference.weight=0.1 reference.into=reward reference.estimate=k3+
reference.weight=0.1 reference.target=0.1
reference.weight=0.1 reference.horizon=1000
reference.weight=0.1 reference.control=adaptive
reference.weight=0.1 reference.control=adaptive reference.target=0.1
reference.weight=0.1 reference.control=adaptive reference.target=0.1 reference.horizon=1
reference.weight=0.1 reference.control=adaptive reference.target=0 reference.horizon=1000
reference.weight=0.1 reference.control=mpc
correction.preset=decoupled_token_is
correction.preset=decoupled_seq_is_rs
correction.preset=bypass_pg_is
correction.preset=decoupled_geo_rs correction.rs={{negative_seq=0.1}}
reference.into=reward reference.weight=0.1
reference.weight=0
reference.host=true
sampler.top_p=0.9
sampler.top_k=5
sampler.min_p=0.1
sampler.keep_mask=true
sampler.engine=vllm sampler.top_p=0.9 sampler.keep_mask=true
sampler.engine=vllm sampler.on_publish=reuse
sampler.top_p=0.9 sampler.min_p=0.1
sampler.top_p=0.9 loss.clip=0.2
{BOTH} sampler.top_p=0.9 loss.kind=forward_kl
{BOTH} sampler.top_k=5 loss.kind=forward_kl policy.loss=cispo
{BOTH} sampler.top_p=0.9 loss.kind=forward_kl correction.preset=decoupled_token_is
sampler.top_p=0.9 loss.kind=forward_kl reference.weight=0.1
sampler.group=3
sampler.group=128
sampler.slots=2 sampler.group=4
sampler.max_tokens=5000
sampler.max_length=20
teachers.main.max_length=20
sampler.max_length=500
eval.every={{}}
schedule.kind=async schedule.tau=1e9
teachers.main.max_length=500
sampler.engine_args={{max_model_len=100}}
sampler.engine=vllm
sampler.engine=vllm learner.lora.rank=600
teachers.main.engine=vllm
learner.token_budget=10
learner.offload=["activations"]
learner.offload=["optimizer","optimizer"] learner.checkpointing=true
teachers.main.token_budget=10
learner.minibatches=3
learner.minibatches=16
learner.ranks=2
learner.ranks=16 runtime.kind=ray
learner.shared_prompt=true
learner.snapshots=2
learner.router=measure
learner.router=replay_rollout
learner.router=replay_old
learner.router=replay_old learner.epochs=2
learner.router=replay_rollout sampler.engine=vllm
learner.router_aux=model
learner.router_aux=0
learner.router_aux=0.1 schedule.kind=periodic
learner.router_aux=0.1 freshness.weight=freshness
learner.lr=1000
output=~nobody/x
sampler.stop=["<|im_end|>"]
learner.betas=[0.9]
learner.betas=[0.9,1.5]
learner.lora.rank=2 learner.lora.targets=["qproj"]
learner.lora.targets=["lm_head"]
learner.lora.rank=0
learner.lora.alpha=0
reuse.times=0
reuse.times=3
reuse.times=1 reuse.order=freshness
reuse.alpha=0.5
reuse.groups=9
reuse.times=4 reuse.max_lag=2
reuse.times=4 reuse.order=freshness reuse.groups=6
reuse.order=advantage
{RL} reuse.order=advantage sampler.group=1
reuse.max_lag=4 schedule.max_lag=4
reuse.times=4 schedule.max_lag=2 schedule.tau=2
reuse.times=2 loss.kind=k2
reuse.times=2 loss.importance=false
reuse.times=2 sft.updates=1
reuse.times=2 mix.source=teacher loss.kind=forward_kl
reuse.times=2 learner.minibatches=8
reuse.times=2 schedule.tau=auto
reuse.times=2 guards.kl.high=0.1
reuse.times=2 teachers.main.model=self teachers.main.context={{prompt}}{{ground_truth}} teachers.main.follow.ema=0.5
{RL} reuse.times=2 policy.loss=reinforce
{RL} reuse.times=2 reference.weight=0.1 reference.importance=false
schedule.kind=asink
schedule.on_old=drop
schedule.max_lag=1
schedule.max_lag=0 schedule.tau=2
schedule.max_lag=4 schedule.order=submission
schedule.max_lag=0 schedule.publish_every=4 schedule.on_old=drop
schedule.kind=sync schedule.tau=2
schedule.kind=step_off schedule.k=0
schedule.kind=replay schedule.k=-1
schedule.publish_every=2 eval.every=3 data.eval=builtin:arithmetic task.reward=exact
eval.every=1
eval.every=1 data.eval=builtin:arithmetic eval.temperature=0.5
eval.every=1 task.reward=exact
eval.every=1 data.eval=nowhere.jsonl task.reward=exact
eval.every=1 eval.n=100 data.eval=builtin:arithmetic task.reward=exact
eval.every=1 eval.n={{a=100}} data.eval={{a="builtin:arithmetic"}} task.reward=exact
eval.every={{a=1}} data.eval=builtin:arithmetic task.reward=exact
eval.every={{a=1,b=2}} data.eval={{a="builtin:arithmetic"}} task.reward=exact
eval.every={{a=0}} data.eval={{a="builtin:arithmetic"}} task.reward=exact
eval.every={{a=3}} data.eval={{a="builtin:arithmetic"}} task.reward=exact schedule.publish_every=2
data.train=nowhere.jsonl
data.train=nowhere/at-all
data.split=validation
data.system_prompt=hello
data.chat=true
data.prompt=question
data.template=plain
data.train=table.csv data.template={{question
data.train=table.csv data.template={{question!r}}
data.train=table.csv data.template={{nothing}}
data.train=table.csv data.template={{question}} data.prompt=question
data.train=table.csv data.prompt=nothing
data.train=table.csv data.prompt=question data.answer=nothing.at.all
data.train=table.csv data.prompt=question task.reward=exact
data.train=pipe.jsonl
data.train=ragged.csv
student=nowhere/at-all
teachers.main.model=nowhere/at-all
teachers.main.model=self
teachers.main.context={{prompt}}{{nothing}}
teachers.main.context=plain
teachers.main.base_url=ftp://x
teachers.main.base_url=http://user:secret@127.0.0.1:1/v1
teachers.main.base_url=http://127.0.0.1:1/v1?x=1
teachers.main.base_url=http://127.0.0.1:1/v1 teachers.main.dtype=bfloat16
teachers.main.base_url=http://127.0.0.1:1/v1 loss.kind=reverse_kl
teachers.main.base_url=http://127.0.0.1:1/v1 loss.temperature=0.5
teachers.main.base_url=http://127.0.0.1:1/v1 loss.m=4
teachers.main.base_url=http://127.0.0.1:1/v1 loss.kind=forward_kl loss.k=64
teachers.main.base_url=http://127.0.0.1:1/v1 teachers.main.api_key_env=secret-key
teachers.main.base_url=http://127.0.0.1:1/v1 teachers.main.api_key_env=NOT_SET_ANYWHERE
teachers.main.base_url=http://127.0.0.1:1/v1
teachers.main.concurrency=4
teachers.main.tokenizer=builtin:student
teachers.other.model=builtin:teacher
teachers.other.model=builtin:teacher teachers.other.key=main
teachers.other.model=builtin:teacher loss.kind=reverse_kl
teachers.a-b.model=builtin:teacher
runtime.address=auto
runtime.device=cuda
runtime.device=cuda:7
runtime.device=abacus
runtime.kind=ray runtime.device=cuda:1
runtime.kind=slurm
log.to=papertrail
log.listen=0.0.0.0:9464
log.listen=9464
log.listen=127.0.0.1:0
log.listen=[::1]:99999
log.to=["wandb","mlflow"]
task.reward=vibes
task.timeout=5.0
runtime.graders=2
data.eval=builtin:arithmetic
data.eval_split=train
eval.prompts=10
eval.n=2
eval.temperature=0.5
health.reward=5
{RL} health.kl=0.1
{RL} health.invalid=0.5
log.project=mine
log.to=tensorboard log.project=mine
data.teacher_key=level
teachers.main.key=math
loss.kind=jsd loss.k=4
loss.kind=forward_kl loss.cache=hidden loss.k=4
{RL} loss.kind=k2 loss.use=advantage
{RL} loss.m=4
{RL} loss.kind=forward_kl
{RL} loss.kind=reverse_kl
{RL} loss.temperature=0.5
teachers.main.engine=vllm teachers.main.token_budget=2048
teachers.main.engine=vllm teachers.main.packing=false
teachers.main.engine=vllm teachers.main.devices=2
teachers.main.engine=vllm teachers.main.engine_args={{dtype="float16"}}
teachers.main.engine=vllm teachers.main.engine_args={{tensor_parallel_size=0}}
teachers.main.engine_args={{tensor_parallel_size=2}}
teachers.main.devices=5
sft.updates=1 sft.source=teacher teachers.main.devices=2
teachers.main.model=builtin:pair_teacher
teachers.main.spelling=own loss.m=1
teachers.main.model=builtin:pair_teacher teachers.main.spelling=own loss.m=2
teachers.main.model=builtin:pair_teacher teachers.main.spelling=own loss.kind=forward_kl
teachers.main.model=builtin:pair_teacher teachers.main.spelling=own loss.kind=reverse_kl
teachers.main.model=builtin:pair_teacher teachers.main.spelling=own loss.kind=reverse_kl_topk
teachers.main.model=builtin:pair_teacher teachers.main.spelling=own loss.m=1 loss.temperature=2.0
teachers.main.model=builtin:pair_teacher teachers.main.spelling=own loss.m=1 loss.reward_scale=1.25
teachers.main.model=builtin:pair_teacher teachers.main.spelling=own loss.m=1 teachers.main.ends=map
teachers.main.model=builtin:pair_teacher teachers.main.spelling=own loss.m=1 teachers.main.relabel=stale
teachers.main.model=self teachers.main.context={{prompt}}{{ground_truth}} teachers.main.spelling=own
teachers.main.spelling=own loss.m=1 teachers.main.context=./own.py:shown teachers.main.max_length=99
teachers.main.model=builtin:pair_teacher teachers.main.spelling=own loss.m=1 mix.source=teacher
teachers.main.model=builtin:pair_teacher teachers.main.spelling=own loss.m=1 sft.updates=1 sft.loss.kind=forward_kl
teachers.main.model=builtin:pair_teacher teachers.main.spelling=own loss.m=1 mix.source=data
teachers.main.model=builtin:pair_teacher teachers.main.spelling=own loss.kind=gold_merged mix.source=data
teachers.main.model=builtin:pair_teacher teachers.main.spelling=own loss.kind=gold_merged loss.temperature=0.5
teachers.main.model=builtin:pair_teacher teachers.main.spelling=own loss.kind=gold_merged sampler.temperature=0.7
teachers.main.model=builtin:pair_teacher teachers.main.spelling=own loss.kind=gold_merged sampler.top_p=0.9
teachers.main.model=builtin:pair_teacher teachers.main.spelling=own loss.kind=gold_merged sampler.min_p=0.1
teachers.main.model=builtin:pair_teacher teachers.main.spelling=own loss.kind=k1 loss.use=advantage sampler.top_k=5
teachers.main.model=builtin:pair_teacher teachers.main.spelling=own loss.m=1 sampler.fusion.alpha=0.5
teachers.main.model=builtin:pair_teacher teachers.main.spelling=own loss.m=1 sampler.max_tokens=200
student=builtin:pair_teacher teachers.main.spelling=own loss.kind=common_topk loss.cache=teacher_topk loss.k=64
teachers.main.engine=vllm teachers.main.ends=map
teachers.main.base_url=http://127.0.0.1:1/v1 loss.kind=forward_kl teachers.main.ends=map
teachers.main.model=self teachers.main.context={{prompt}}{{ground_truth}} teachers.main.ends=map
teachers.main.ends=map
sampler.stop=<eos>
sampler.stop=[1]
sampler.stop=[5000]
sampler.stop=[""]
sampler.stop=["12"]
learner.dropout=true
data.train=rows.jsonl data.split=test
eval.every=1 task.reward=exact data.eval=rows.jsonl data.eval_split=test
data.template_args={{enable_thinking=false}}
teachers.main.template_args={{enable_thinking=false}}
teachers.main.model=builtin:pair_teacher teachers.main.spelling=own loss.m=1 teachers.main.template_args={{x=1}}
seed=one
updates=0
nonsense=1
data.train=levels.jsonl schedule.mixture=level schedule.order=completion
data.train=levels.jsonl schedule.mixture=levle
data.train=levels.jsonl schedule.mixture=same
data.train=levels.jsonl schedule.mixture=number
schedule.mixture=level
schedule.kind=sync schedule.mixture=level
learner.learning_rate=1
output=taken
""".strip().splitlines()


def beyond(info: FieldInfo) -> Iterator[str]:
    """Values outside of the bounds and the choices of one setting."""
    for bound in info.metadata:
        for name, step in (("ge", -1), ("gt", 0), ("le", 1), ("lt", 0)):
            if (limit := getattr(bound, name, None)) is not None:
                yield str(limit + step)
    yield "{odd=[1]}"


SCHEMA = [
    f"{'loss.kind=' + kind.split(' ')[0] + ' ' if name.startswith('loss.') and kind else ''}"
    f"{'schedule.kind=' + kind + ' ' if name.startswith('schedule.') and kind else ''}"
    f"{name.replace('.NAME', '.main')}={value}"
    for name, info, kind in fields()
    for value in beyond(info)
    if not name.startswith(("policy", "reference", "learner.lora", "correction.rs"))
    and name not in ("policy.options", "data.template_args", "teachers.NAME.template_args")
    and not name.endswith("engine_args")
]
