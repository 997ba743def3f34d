/* attention_bench.c - see attention_bench.h. */
#include "attention_bench.h"

#include "command.h"
#include "interrupt.h"
#include "rows.h"
#include "stats.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define COLD_BYTES (32.0 * (1 << 20)) /* 16 times a level 2 cache of 2 MiB */
#define PREFILL_LAYERS 2u /* many queries spend little of their time on reading */
#define HALF_MINUS_INF 0xfc00u

uint32_t attention_layers(const attention_shape *shape, double bytes)
{
    const double n = ceil(COLD_BYTES / bytes);
    if (shape->n_queries > 8)
        return PREFILL_LAYERS;
    return n > ATTENTION_MAX_LAYERS ? ATTENTION_MAX_LAYERS : n < 2 ? 2 : (uint32_t)n;
}

bool attention_is_finite(const float *out, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!isfinite(out[i]))
            return complain("number %zu of the output is not finite", i);
    return true;
}

/* Preparing a subject counts as one round. */
double attention_work(const attention_bench *b, const attention_shape *s)
{
    return (b->rounds + 1) *
           ((double)s->batch * s->n_tokens * s->n_queries * s->n_heads * s->head_dim + 1e8);
}

static bool step(attention_bench *b, const attention_shape *s, const attention_entry *e)
{
    char what[160];
    snprintf(what, sizeof what, "%s %s, head_dim %u, %u tokens, %u queries", e->library, e->k,
             (unsigned)s->head_dim, (unsigned)s->n_tokens, (unsigned)s->n_queries);
    progress_add(&b->progress, attention_work(b, s) / (b->rounds + 1), what);
    return !interrupted();
}

static bool create_inputs(attention_inputs *in, const attention_shape *s)
{
    const uint32_t whole = (s->n_tokens + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS * KVANT_PAGE_TOKENS;
    *in = (attention_inputs){ .shape = *s, .n_rows = whole < ATTENTION_DISTINCT_ROWS ? whole : ATTENTION_DISTINCT_ROWS };
    const size_t n_kv = (size_t)in->n_rows * s->n_kv_heads * s->head_dim;
    const size_t n_q = (size_t)s->batch * s->n_queries * s->n_heads * s->head_dim;
    in->k = malloc(n_kv * sizeof *in->k);
    in->v = malloc(n_kv * sizeof *in->v);
    in->q = malloc(n_q * sizeof *in->q);
    in->mask = malloc((size_t)s->n_queries * s->n_tokens * sizeof *in->mask);
    if (in->k == NULL || in->v == NULL || in->q == NULL || in->mask == NULL)
        return complain("out of memory");
    rows_fill(in->k, n_kv, 1);
    rows_fill(in->v, n_kv, 2);
    rows_fill(in->q, n_q, 3);
    for (uint32_t t = 0; t < s->n_queries; t++)
        for (uint32_t j = 0; j < s->n_tokens; j++)
            in->mask[(size_t)t * s->n_tokens + j] = j + s->n_queries > s->n_tokens + t ? HALF_MINUS_INF : 0;
    return true;
}

static void free_inputs(attention_inputs *in)
{
    free(in->k);
    free(in->v);
    free(in->q);
    free(in->mask);
}

static bool run_rounds(attention_bench *b, const attention_inputs *in, attention_entry *entries, size_t n)
{
    bool ok = true;
    double ignored;
    for (size_t i = 0; i < n && ok; i++) {
        attention_entry *e = &entries[i];
        ok = b->create(e, in) && e->subject.run(&e->subject, &ignored) && e->subject.check(&e->subject) &&
             step(b, &in->shape, e);
    }
    for (uint32_t round = 0; round < b->rounds && ok; round++)
        for (size_t i = 0; i < n && ok; i++)
            ok = entries[i].subject.run(&entries[i].subject, &entries[i].seconds[round]) &&
                 step(b, &in->shape, &entries[i]);
    return ok;
}

static bool add_rows(attention_bench *b, const attention_shape *shape, attention_entry *entries, size_t n)
{
    report_cell *grown = realloc(b->cells, (b->n_rows + n) * b->n_columns * sizeof *grown);
    if (grown == NULL)
        return complain("out of memory");
    b->cells = grown;
    for (size_t i = 0; i < n; i++)
        entries[i].median = stats_percentile(entries[i].seconds, b->rounds, 0.5);
    for (size_t i = 0; i < n; i++)
        b->fill_row(b, &entries[i], shape, b->cells + b->n_rows++ * b->n_columns);
    return true;
}

bool attention_measure(attention_bench *b, const attention_shape *shape, attention_entry *entries, size_t n)
{
    attention_inputs inputs;
    const bool ok = create_inputs(&inputs, shape) && run_rounds(b, &inputs, entries, n) &&
                    add_rows(b, shape, entries, n);
    for (size_t i = 0; i < n; i++) {
        if (entries[i].subject.state != NULL)
            entries[i].subject.free(entries[i].subject.state);
        entries[i].subject = (attention_subject){ .state = NULL };
    }
    free_inputs(&inputs);
    return ok;
}

int attention_finish(attention_bench *b, bool ok, bool json)
{
    int code = ok ? EXIT_OK : interrupted() ? EXIT_INTERRUPTED : EXIT_RUNTIME;
    if (code != EXIT_RUNTIME && (!report_print(b->columns, b->n_columns, b->cells, b->n_rows, json) ||
                                 finish_output() != EXIT_OK))
        code = EXIT_RUNTIME;
    free(b->cells);
    free(b);
    return code;
}
