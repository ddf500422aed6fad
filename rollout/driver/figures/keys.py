"""The names of step figures, as ``on_metrics`` and trackers get them, and what each one is.

Always true: a name is never used for something else.  A part in braces stands for many names.
"""

from __future__ import annotations

from collections.abc import Mapping

STEP = "rollout/step"
"""The step of figures, for trackers whose own step must only rise."""
SAMPLES = "rollout/samples"
"""The table of samples."""

KEYS: Mapping[str, str] = {
    # Every step: rollout/driver/stream/step_metrics.py
    "rollout/num_groups": "groups of the batch",
    "rollout/num_samples": "samples of the batch",
    "rollout/reward/{mean,std,max,min}": "rewards of all samples that have one; 0 without any",
    "rollout/response_len/{mean,median,max,min}": "output tokens of a sample",
    "rollout/truncated_ratio": "share of the samples that ended at their length limit",
    "rollout/failed_ratio": "share of the samples that failed",
    "rollout/repetition_frac": "share of the samples whose text mostly repeats itself",
    "rollout/zero_std_groups": "groups whose samples have equal rewards",
    "rollout/mixed_version_ratio": "share of the samples with tokens of several weight versions",
    "rollout/partial_samples": "samples that were interrupted unfinished when the batch was full",
    "rollout/rejected_groups": "groups that filters have dropped",
    "rollout/stale_samples_redone": "stale samples that were generated again",
    "rollout/stale_groups_dropped": "groups that were dropped because of their age",
    "rollout/lost_replies": "replies that were lost with their engine or connection",
    "rollout/cut_replies": "replies that came back aborted",
    "rollout/seconds": "from the call until the batch was full",
    "rollout/tokens_per_s": "trained tokens of the batch per second",
    "rollout/samples_per_s": "samples of the batch per second",
    "rollout/engine_busy_share": "used share of the driver's slots",
    "rollout/boundary_s": "seconds with nothing in flight before this batch",
    # Where there is one
    "rollout/failed/{kind}": "failed samples of a kind, with those that were dropped",
    "rollout/rejected/{reason}": "groups that filters have dropped for this reason",
    "rollout/version_lag/{versions}": "samples whose oldest token is so many versions behind",
    "rollout/journal_lost_s": "seconds of finished groups that the journal does not have so far",
    # Of the server's last step
    "server/weight_version": "the version that serves",
    "server/restarts": "engines that were started again so far",
    "server/lost_s": "seconds without generation outside of the trainer's time",
    "server/paused_s": "seconds without generation because of the push",
    "server/trainer_s": "seconds in which the trainer had the memory",
    "server/phase_s/{command}": "seconds of a command of the lifecycle",
    "server/unchanged_tensors": "tensors that pushes should have changed and have not",
    "server/draft_accepted_ratio": "share of drafted tokens that were right",
    # Of check_logprobs
    "logprob_gap/mean": "mean size of the difference between trainer's and engine's log-probs",
    "logprob_gap/largest": "the largest difference",
    "logprob_gap/bias": "mean difference, trainer minus engine",
    "logprob_gap/{kl_k1,kl_k3}": "estimates of the KL divergence",
    "logprob_gap/mean_ratio": "mean probability ratio",
    "logprob_gap/truncated_share": "share of the tokens whose ratio is over the usual cap",
    "logprob_gap/{effective_share,effective_sequences}": "effective sample size, of tokens and of "
    "sequences, as a share",
    "logprob_gap/{num_tokens,num_not_finite}": "compared tokens, and those without a finite value",
    "logprob_gap/is_mismatch": "1 where the gap is over its limit",
    "logprob_gap/engine/{engine}": "mean gap of the tokens of an engine",
    # Of evaluations
    "eval/{dataset}": "mean reward of a data set",
    "eval/{dataset}/response_len/{mean,median,max,min}": "output tokens of a sample",
    "eval/{dataset}/{repetition_frac,truncated_ratio,mixed_version_ratio}": "as of a step",
    "eval/{dataset}/none_reward_ratio": "share of the samples without a reward",
    "eval/{dataset}/pass@{k}": "probability that one of k samples is right",
    "eval/{dataset}/zero_std/{num_all_right,num_all_wrong}": "groups with equal rewards",
    "eval/{dataset}/weight_version/{min,max}": "weight versions of the tokens; -1 without any",
}


def families() -> list[str]:
    """The first parts of all names."""
    return list(dict.fromkeys(key.partition("/")[0] for key in KEYS))
