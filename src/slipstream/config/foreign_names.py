"""Names of verl and TRL for settings, and what to write here instead. Only error messages use them."""

FOREIGN_KEYS = {
    **dict.fromkeys(("lr", "learning_rate"), "learner.lr"),
    **dict.fromkeys(("max_steps", "total_training_steps"), "updates"),
    **dict.fromkeys(("num_generations", "n", "rollout_n"), "sampler.group"),
    **dict.fromkeys(("max_completion_length", "max_response_length", "max_new_tokens"), "sampler.max_tokens"),
    "per_device_train_batch_size": "learner.batch_size, which counts the samples of an update on all devices",
    "train_batch_size": "learner.batch_size, which counts answers: prompts times sampler.group",
    "ppo_mini_batch_size": "learner.minibatches, the number of optimizer steps of an update",
    **dict.fromkeys(("num_iterations", "ppo_epochs"), "learner.epochs"),
    **dict.fromkeys(("max_grad_norm", "grad_clip"), "learner.clip_norm"),
    **dict.fromkeys(("beta", "kl_coef", "kl_loss_coef"), "reference.weight"),
    "adv_estimator": "policy.advantage",
    "clip_ratio_c": "policy.options, whose dual_clip it is",
    "rollout_is": "correction.is_level",
    "rollout_is_threshold": "correction.is_threshold",
    "rollout_rs": "correction.rs, modes with their bounds",
    "distillation": "loss.kind, and [teachers.NAME] for each teacher",
    "distillation_loss_coef": "loss.weight",
    "use_task_rewards": "policy.loss, in the section [policy] for task rewards",
    **dict.fromkeys(("loss_mode", "loss_type"), "policy.loss"),
    **dict.fromkeys(("warmup_steps", "lr_warmup_steps"), "learner.warmup"),
}
"""Key to write here, by the last part of a foreign key. Text behind a comma says what it means, without a value."""
DISTILLATION_KEYS = {
    **dict.fromkeys(("loss_mode", "loss_type"), "loss.kind"),
    "topk": "loss.k",
    "use_policy_gradient": 'loss.kind, which is "k1" beside loss.use = "advantage"',
    "policy_loss_mode": "loss.policy",
    **dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high"), "loss.clip, one bound or [low, high]"),
}
"""The same for keys in [loss], and in [sft.loss] with the prefix `sft`."""

PPO = 'write policy.loss = "vanilla", which is PPO\'s clip, and policy.advantage = "grpo"'
VALUES = {
    "policy.loss": {"grpo": PPO, "ppo": PPO, "ppo_clip": PPO, "dapo": PPO, "bnpo": PPO, "dr_grpo": PPO}
    | {"geo_mean": 'write policy.loss = "gmpo"'},
    "policy.advantage": {
        "grpo_vectorized": 'write policy.advantage = "grpo"',
        "rloo_vectorized": 'write policy.advantage = "rloo"',
        "tir_optimal_token_baseline": 'write policy.advantage = "optimal_token_baseline"',
    },
    "reference.estimate": {
        foreign: f'write reference.estimate = "{own}"'
        for foreign, own in {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "full": "k3"}.items()
    },
}
"""Text that names the setting to write here, by key and foreign value."""
