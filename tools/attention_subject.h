/* attention_subject.h - the subject of `kvant bench attention`: an implementation of attention over
 * caches of one shape.
 *
 * A subject has several layers, each with its own cache of the same content. A run is one call per
 * layer. Together the caches exceed the level 2 caches many times over: in a model, too, a layer's
 * cache is evicted before its next turn. */
#ifndef KVANT_TOOLS_ATTENTION_SUBJECT_H
#define KVANT_TOOLS_ATTENTION_SUBJECT_H

#include <kvant/kvant.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ATTENTION_DISTINCT_ROWS 2048u /* of a cache; more tokens repeat them: content does not change the time */

typedef struct attention_shape {
    uint32_t head_dim, group, n_kv_heads; /* group: query heads of a kv head */
    uint32_t n_tokens, n_queries, n_threads;
} attention_shape;

static inline uint32_t attention_heads(const attention_shape *s)
{
    return s->group * s->n_kv_heads;
}

/* Inputs of all subjects of a shape. */
typedef struct attention_problem {
    attention_shape shape;
    uint32_t n_rows; /* distinct ones */
    float *k, *v;    /* n_rows x n_kv_heads x head_dim */
    float *q;        /* n_queries x heads x head_dim */
    uint16_t *mask;  /* n_queries x n_tokens of fp16, causal: the queries are the last tokens */
} attention_problem;

bool attention_problem_create(attention_problem *problem, const attention_shape *shape);
void attention_problem_free(attention_problem *problem);

typedef struct attention_subject {
    double bytes; /* of keys and values that one call reads */
    uint32_t n_layers;
    void *state;
    bool (*run)(struct attention_subject *subject);            /* one call on each layer; false after complaining */
    const float *(*output)(struct attention_subject *subject); /* of the last layer, n_queries x heads x head_dim */
    void (*free)(struct attention_subject *subject);
} attention_subject;

/* Layers for caches of so many bytes per layer. */
uint32_t attention_layers(const attention_shape *shape, double bytes);

/* False after complaining; the subject can be freed in any case. Names must outlive it. */
bool attention_kvant(attention_subject *subject, const attention_problem *problem, const char *k, const char *v,
                     kvant_cpu_level level);

/* ggml's flash attention on its CPU back end. attention_ggml_open loads the runtime from a folder
 * (NULL: the default one) and starts its thread pool. */
bool attention_ggml_knows(const char *type); /* "q8_0"; false after complaining */
bool attention_ggml_open(const char *runtime, uint32_t n_threads);
bool attention_ggml(attention_subject *subject, const attention_problem *problem, const char *type);
void attention_ggml_close(void);

#endif
