/* report_plan.h - what `kvant report` measures: steps, each one subcommand, with an estimate of its
 * time. */
#ifndef KVANT_TOOLS_REPORT_PLAN_H
#define KVANT_TOOLS_REPORT_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { PLAN_MAX_ARGUMENTS = 240, PLAN_MAX_STEPS = 16, PLAN_TEXT = 16384 };

/* Words of a command line; strings belong to argv, are constant or lie in the plan. */
typedef struct plan_words {
    const char *words[PLAN_MAX_ARGUMENTS + 1]; /* NULL behind the last */
    size_t n;
} plan_words;

typedef struct plan_step {
    char name[32]; /* "quality", "needle:1024", ... */
    plan_words command;
    double seconds; /* estimated */
} plan_step;

/* What the plan is made from. */
typedef struct plan_request {
    const char *model, *text, *state, *needles; /* files, the last two of --resume */
    const plan_words *common;         /* words that every step gets: --runtime, --threads, ... */
    const plan_words *configs;        /* of the user; empty: the default ones */
    const plan_words *settings;       /* settings files, measured beside either */
    bool calibrated;                  /* there is a calibration: its codecs, too */
    bool quick;
    uint32_t n_ctx, n_chunks;       /* of the evaluation */
    uint32_t longest;               /* of needles and speed, at most */
    uint32_t n_ctx_train;           /* the model's limit */
    double prefill_tps, decode_tps; /* of the f16 cache, measured */
} plan_request;

typedef struct plan {
    plan_step steps[PLAN_MAX_STEPS];
    size_t n_steps;
    char numbers[PLAN_TEXT]; /* storage of words that are made here */
    size_t used;
} plan;

/* False after complaining that there is no room. */
bool plan_make(plan *p, const plan_request *request);
bool plan_words_add(plan_words *w, const char *word);

/* "kvant eval -m model.gguf ...", folders of files left out. */
void plan_command_line(const plan_step *step, char *line, size_t room);

#endif /* KVANT_TOOLS_REPORT_PLAN_H */
