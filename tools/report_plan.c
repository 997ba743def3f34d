/* report_plan.c - default configurations, lengths and depths; steps and their times. */
#include "report_plan.h"

#include "command.h"

#include <stdio.h>
#include <string.h>

enum { NEEDLES = 8, TRIALS = 2, PREFILL = 256, DECODE = 16, ROUNDS = 2, MOST_COMPARED = 6 };

/* Codecs take longer than f16, and scoring takes time of its own: measured on small models, where both weigh most. */
#define EVAL_COST 1.6
#define START_SECONDS 2.0

/* Every family, and the points of it that somebody may choose. */
static const char *const everything[] = {
    "--stock q8_0",
    "--stock q5_1",
    "--stock q5_0",
    "--stock q4_1",
    "--stock q4_0",
    "--stock q8_0/q4_0",
    "--preset quality",
    "--preset balanced",
    "--preset small",
    "-k int-4:axis=channel,group=64 -v turboquant-4",
    "-k int-3:axis=channel -v turboquant-3",
    "-k int-4:axis=channel,group=64 -v trellis-4",
    "-k trellis-4:center=first,norm=first -v trellis-4",
    "-k trellis-4:center=first,norm=first -v trellis-3",
    "-k trellis-3:center=first,norm=first -v trellis-3",
    "-k trellis-4",
    "-k trellis-3",
    "-k trellis-2",
    "-k turboquant-5:center=first",
    "-k turboquant-4:center=first",
    "-k turboquant-5",
    "-k turboquant-4",
    "-k turboquant-3",
    "-k turboquant-2",
    "-k octopus-4",
    "-k octopus-3",
    "-k polar-4",
    "-k bdr-4",
    "-k int-8",
    "-k int-4",
    "-k kivi-4",
    "-k kivi-2:sink=32,recent=96",
    "-k innerq-base",
    "-k hqmq-s192r6:med3",
    "-k addvq-k48r4",
};

static const char *const with_calibration[] = {
    "-k turboquant-5:transform=file,feedback -v turboquant-5",
    "-k turboquant-4:transform=file,feedback -v trellis-4",
    "-k turboquant-4:transform=file -v turboquant-4",
    "-k trellis-4:transform=file -v trellis-3",
    "-k turboquant-3:transform=file,feedback -v trellis-3",
    "-k trellis-3:transform=file -v trellis-2",
    "-k trellis-2:transform=file -v trellis-2",
    "-k hessian-4",
};

/* What speed, memory and needles are compared on. */
static const char *const compared[] = {
    "--stock q8_0", "--stock q4_0", "--preset quality", "--preset balanced", "--preset small", "-k turboquant-4",
};

static const char *const few[] = {
    "--stock q8_0", "--stock q4_0", "--preset quality", "--preset balanced", "--preset small",
};

#define COUNT(list) (sizeof(list) / sizeof *(list))

bool plan_words_add(plan_words *w, const char *word)
{
    if (w->n == PLAN_MAX_ARGUMENTS) {
        complain("report: more than %d words on a command line", PLAN_MAX_ARGUMENTS);
        return false;
    }
    w->words[w->n++] = word;
    w->words[w->n] = NULL;
    return true;
}

static const char *keep(plan *p, const char *word, size_t n)
{
    if (n >= sizeof p->numbers - p->used) {
        complain("report: the plan has no room for more words");
        return NULL;
    }
    char *kept = p->numbers + p->used;
    memcpy(kept, word, n);
    kept[n] = 0;
    p->used += n + 1;
    return kept;
}

/* Words of a line, parted by single spaces. */
static bool add_line(plan *p, plan_words *w, const char *line)
{
    for (const char *end; *line != 0; line = *end != 0 ? end + 1 : end) {
        end = line + strcspn(line, " ");
        const char *word = keep(p, line, (size_t)(end - line));
        if (word == NULL || !plan_words_add(w, word))
            return false;
    }
    return true;
}

static bool add_number(plan *p, plan_words *w, const char *option, uint32_t number)
{
    char line[64];
    snprintf(line, sizeof line, "%s %lu", option, (unsigned long)number);
    return add_line(p, w, line);
}

static bool add_words(plan_words *w, const plan_words *more)
{
    bool ok = true;
    for (size_t i = 0; i < more->n && ok; i++)
        ok = plan_words_add(w, more->words[i]);
    return ok;
}

static bool is_config(const char *word)
{
    return strcmp(word, "--codec-k") == 0 || strcmp(word, "--stock") == 0 || strcmp(word, "--preset") == 0 ||
           strcmp(word, "--config") == 0;
}

/* At most so many configurations of the words, with what follows each; adds to the count. */
static bool add_first(plan_words *w, const plan_words *configs, size_t most, double *count)
{
    size_t n = 0;
    bool ok = true;
    for (size_t i = 0; i < configs->n && ok; i++) {
        n += is_config(configs->words[i]);
        if (n > most)
            break;
        ok = plan_words_add(w, configs->words[i]);
    }
    *count += (double)(n < most ? n : most);
    return ok;
}

/* The user's own, at most so many of them, or a list; settings files behind either. Says how many. */
static bool add_configs(plan *p, plan_words *w, const plan_request *q, const char *const *list, size_t n,
                        size_t most, double *count)
{
    *count = 0;
    bool ok = add_first(w, q->configs, most, count);
    for (size_t i = 0; q->configs->n == 0 && i < n && ok; i++, ++*count)
        ok = add_line(p, w, list[i]);
    return ok && add_first(w, q->settings, most, count);
}

static plan_step *add_step(plan *p, const plan_request *q, const char *command, const char *name)
{
    if (p->n_steps == PLAN_MAX_STEPS)
        return NULL;
    plan_step *step = &p->steps[p->n_steps++];
    snprintf(step->name, sizeof step->name, "%s", name);
    return add_line(p, &step->command, command) && plan_words_add(&step->command, "-m") &&
                   plan_words_add(&step->command, q->model) && plan_words_add(&step->command, "--json") &&
                   add_words(&step->command, q->common)
               ? step
               : NULL;
}

static bool add_eval(plan *p, const plan_request *q, const char *name, uint32_t n_bins)
{
    double n = 0, more = 0;
    plan_step *s = add_step(p, q, "eval", name);
    if (s == NULL || !plan_words_add(&s->command, "-f") || !plan_words_add(&s->command, q->text) ||
        !add_number(p, &s->command, "-c", q->n_ctx) || !add_number(p, &s->command, "--chunks", q->n_chunks) ||
        !plan_words_add(&s->command, "--resume") || !plan_words_add(&s->command, q->state) ||
        (n_bins > 1 && !add_number(p, &s->command, "--by-position", n_bins)) ||
        !add_configs(p, &s->command, q, q->quick ? few : everything, q->quick ? COUNT(few) : COUNT(everything),
                     SIZE_MAX, &n))
        return false;
    for (size_t i = 0; q->calibrated && !q->quick && q->configs->n == 0 && i < COUNT(with_calibration); i++, more++)
        if (!add_line(p, &s->command, with_calibration[i]))
            return false;
    s->seconds = START_SECONDS;
    if (n_bins <= 1) /* the other one only reads what this one kept */
        s->seconds += q->n_ctx * (double)q->n_chunks * (1 + EVAL_COST * (n + more)) / q->prefill_tps;
    return true;
}

static bool add_needle(plan *p, const plan_request *q, uint32_t length)
{
    char name[32];
    double n;
    const uint32_t trials = q->quick ? 1 : TRIALS;
    snprintf(name, sizeof name, "needle:%lu", (unsigned long)length);
    plan_step *s = add_step(p, q, "needle", name);
    if (s == NULL || !add_number(p, &s->command, "-c", length) || !add_number(p, &s->command, "-n", NEEDLES) ||
        !add_number(p, &s->command, "-r", trials) || !plan_words_add(&s->command, "--resume") ||
        !plan_words_add(&s->command, q->needles) ||
        !add_configs(p, &s->command, q, q->quick ? few : compared, q->quick ? COUNT(few) : COUNT(compared),
                     MOST_COMPARED, &n))
        return false;
    s->seconds = START_SECONDS + 1.3 * (n + 1) * trials * length / q->prefill_tps;
    return true;
}

static bool add_speed(plan *p, const plan_request *q, uint32_t deepest)
{
    char depths[64];
    double n;
    plan_step *s = add_step(p, q, "bench model", "speed");
    const uint32_t rounds = q->quick ? 1 : ROUNDS;
    snprintf(depths, sizeof depths, "-d 0,%lu,%lu", (unsigned long)deepest / 4, (unsigned long)deepest);
    if (s == NULL || !add_line(p, &s->command, depths) || !add_number(p, &s->command, "-p", PREFILL) ||
        !add_number(p, &s->command, "-n", DECODE) || !add_number(p, &s->command, "-r", rounds) ||
        !add_line(p, &s->command, "--stock f16") ||
        !add_configs(p, &s->command, q, q->quick ? few : compared, q->quick ? COUNT(few) : COUNT(compared),
                     MOST_COMPARED, &n))
        return false;
    s->seconds = START_SECONDS +
                 1.5 * (n + 1) *
                     ((deepest + 3.0 * rounds * PREFILL) / q->prefill_tps + 3.0 * rounds * DECODE / q->decode_tps);
    return true;
}

/* Quality first, which is what most come for; the longest contexts last. */
bool plan_make(plan *p, const plan_request *q)
{
    const uint32_t longest = q->longest < q->n_ctx_train ? q->longest : q->n_ctx_train;
    *p = (plan){ .n_steps = 0 };
    if (!add_eval(p, q, "quality", 1) || !add_eval(p, q, "position", 8) ||
        !add_speed(p, q, longest + PREFILL <= q->n_ctx_train ? longest : longest / 2))
        return false;
    for (uint32_t length = 512; length <= longest; length *= 2)
        if (!add_needle(p, q, length))
            return false;
    return true;
}

static const char *without_folder(const char *word)
{
    const char *slash = word[0] == '/' || word[0] == '.' ? strrchr(word, '/') : NULL;
    return slash != NULL ? slash + 1 : word;
}

void plan_command_line(const plan_step *step, char *line, size_t room)
{
    size_t used = (size_t)snprintf(line, room, "kvant");
    for (size_t i = 0; i < step->command.n && used < room; i++)
        used += (size_t)snprintf(line + used, room - used, " %s", without_folder(step->command.words[i]));
}
