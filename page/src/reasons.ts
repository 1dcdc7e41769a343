/** As flotilla/cli/reasons.py has them: why a group was filtered, dropped or failed. */
const REASONS: Record<string, string> = {
  abstained: "too few answers have a reward: graders abstained",
  all_abstained: "no answer has a reward: graders abstained",
  all_masked: "no answer is left to train on: reward.sample_mask",
  episode_failed: "every answer failed while it was sampled: its environment, a tool or its prompt",
  evaluation_over: "its evaluation had ended",
  experiment_ended: "under way when the experiment ended",
  grading_error: "no answer could be graded",
  mean_in_range: "the mean reward is outside of reward.group_filter's range",
  no_teacher: "an answer has no log-probabilities of a teacher",
  nothing_sampled: "no token was sampled",
  prompt_too_long: "the prompt is too long",
  rollout_timeout: "sampling took longer than its limit",
  spread_above: "the rewards differ too little for reward.group_filter",
  stale: "older than asynchrony.max_lag",
  teacher_error: "no answer could be judged by the teacher behind a URL",
  too_few_scored: "too few answers could be graded",
  zero_spread: "all answers had the same reward, which teaches nothing",
};

export const meaningOf = (reason: string): string => (REASONS[reason] ? `${REASONS[reason]} (${reason})` : reason);
