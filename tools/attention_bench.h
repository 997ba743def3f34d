/* attention_bench.h - what `kvant bench attention` and `kvant bench cuda` share: the inputs of a shape, subjects that
 * compute attention over them, rounds of measurements, rows of results.
 *
 * A subject is one implementation over caches of one shape. It knows how to time itself, because a GPU has a clock of its
 * own. Rounds go over all subjects of a measurement before the next begins, so drift of the machine hits them alike, and
 * medians are given. */
#ifndef KVANT_TOOLS_ATTENTION_BENCH_H
#define KVANT_TOOLS_ATTENTION_BENCH_H

#include "codec_pairs.h"
#include "progress.h"
#include "report.h"

#include <kvant/codec.h>

#define ATTENTION_DISTINCT_ROWS 2048u /* of a cache; more tokens repeat them: content does not change the time */

enum { ATTENTION_MAX_ROUNDS = 1001, ATTENTION_MAX_LEVELS = 8, ATTENTION_MAX_STOCK = 9, ATTENTION_MAX_LAYERS = 128 };
enum { ATTENTION_MAX_ENTRIES = MAX_PAIRS * ATTENTION_MAX_LEVELS + ATTENTION_MAX_STOCK };

typedef struct attention_shape {
    uint32_t head_dim, n_heads, n_kv_heads, n_tokens, n_queries, batch, n_threads;
} attention_shape;

/* Inputs of all subjects of a shape. */
typedef struct attention_inputs {
    attention_shape shape;
    uint32_t n_rows; /* distinct ones, whole blocks */
    float *k, *v;    /* n_rows x n_kv_heads x head_dim */
    float *q;        /* batch x n_queries x n_heads x head_dim */
    uint16_t *mask;  /* n_queries x n_tokens of fp16, causal: the queries are the last tokens */
} attention_inputs;

typedef struct attention_subject {
    double bytes; /* of keys and values that one call reads */
    uint32_t n_layers;
    double error; /* after check, where the subject has an exact result beside its own */
    void *state;
    bool (*run)(struct attention_subject *subject, double *seconds); /* of one call; false after complaining */
    bool (*check)(struct attention_subject *subject);                /* the output of the last run */
    void (*free)(void *state);
} attention_subject;

typedef struct attention_entry {
    const char *library, *k, *v; /* from argv or constant */
    kvant_cpu_level level;       /* of kvant on the CPU */
    attention_subject subject;
    double seconds[ATTENTION_MAX_ROUNDS], median;
} attention_entry;

typedef struct attention_bench {
    const report_column *columns;
    size_t n_columns;
    uint32_t rounds;
    double bandwidth; /* what the machine moves at best, bytes a second */
    /* Makes a subject; its free is called in any case. False after complaining. */
    bool (*create)(attention_entry *entry, const attention_inputs *inputs);
    void (*fill_row)(const struct attention_bench *b, const attention_entry *entry, const attention_shape *shape,
                     report_cell *row);
    attention_entry entries[ATTENTION_MAX_ENTRIES];
    size_t n_entries;
    progress progress;
    report_cell *cells;
    size_t n_rows;
} attention_bench;

/* What measuring one entry over a shape adds to the progress. */
double attention_work(const attention_bench *b, const attention_shape *shape);

/* Measures n entries side by side and adds their rows. The first run of each is a warm-up, whose output is checked. False
 * when interrupted, or after complaining. */
bool attention_measure(attention_bench *b, const attention_shape *shape, attention_entry *entries, size_t n);

/* Prints what is complete, unless something failed, and frees the bench. The exit code. */
int attention_finish(attention_bench *b, bool ok, bool json);

/* Complains unless all n numbers of an output are finite. */
bool attention_is_finite(const float *out, size_t n);

/* Layers that a run goes around, for caches of so many bytes per layer: together they exceed the level 2 caches many
 * times over, because in a model, too, a layer's cache is evicted before its next turn. */
uint32_t attention_layers(const attention_shape *shape, double bytes);

/* Subjects. Names must outlive them. */
bool attention_kvant(attention_subject *subject, const attention_inputs *inputs, const char *k, const char *v,
                     kvant_cpu_level level);

/* ggml's flash attention on its CPU back end. open loads the runtime from a folder (NULL: the default one) and starts its
 * thread pool. */
bool attention_ggml_knows(const char *type); /* "q8_0"; false after complaining */
bool attention_ggml_open(const char *runtime, uint32_t n_threads);
bool attention_ggml(attention_subject *subject, const attention_inputs *inputs, const char *type);
void attention_ggml_close(void);

#endif /* KVANT_TOOLS_ATTENTION_BENCH_H */
