/* search.h - `kvant search`: what its command line (cmd_search.c) and its actions share.
 *
 * search_index.c builds and opens indexes, search_query.c searches them, and search_eval.c measures
 * searches. An action returns false after it has complained, or when it was interrupted. */
#pragma once

#include "vectors.h"

#include <kvant/index.h>

enum { SEARCH_MAX_SPECS = 16 };

typedef struct search_settings {
    const char *metric, *device, *allow;
    const char *specs[SEARCH_MAX_SPECS];
    size_t n_specs;
    uint32_t k, threads, rerank, probe, train, batch, queries;
    const char *centroids;
    bool json, verify;
} search_settings;

/* The neighbours of queries: k scores and k ids for each query. */
typedef struct search_answers {
    float *scores;
    uint64_t *ids;
} search_answers;

/* The ids that a search may find. */
typedef struct search_id_list {
    uint64_t *ids; /* NULL: all vectors are allowed */
    size_t n;
} search_id_list;

/* The actions. files: the words after the action's name. */
bool search_build(const search_settings *s, const char *const *files);
bool search_info(const search_settings *s, const char *const *files);
bool search_query(const search_settings *s, const char *const *files);
bool search_eval(const search_settings *s, const char *const *files);

/* Complains with the library's message. Returns false. */
bool search_failed(const char *what);

const char *search_metric_name(kvant_metric metric);

/* The metric of a name; NULL is the inner product. */
bool search_find_metric(const char *name, kvant_metric *metric);

bool search_same_dimensions(const char *what, const vectors *v, uint32_t dim);

/* Makes an index of the vectors with the codec. The caller frees *index in any case. */
bool search_make_index(const search_settings *s, const char *codec, const vectors *base,
                       kvant_index **index);

/* Opens the index of a file. verify: reads the whole file and compares its checksum. The caller
 * frees *index in any case. */
bool search_open_index(const char *path, bool verify, kvant_index **index);

bool search_on_gpu(const search_settings *s);

/* Copies the index to a GPU for --device cuda; *gpu stays NULL on the CPU. */
bool search_copy_to_gpu(const search_settings *s, const kvant_index *index, kvant_index_gpu **gpu);

/* Room for the neighbours of n queries. search_free_answers in any case. */
bool search_allocate_answers(search_answers *a, size_t n, uint32_t k);
void search_free_answers(search_answers *a);

/* Searches n of the queries from `first` on, with `base` for --rerank, or NULL. allowed: the ids
 * that a search may find, or NULL. The answers to query i go to scores + i * k and ids + i * k. */
bool search_run(const kvant_index *index, const kvant_index_gpu *gpu, const search_settings *s,
                const vectors *queries, size_t first, size_t n, const vectors *base,
                const search_id_list *allowed, search_answers *a);
