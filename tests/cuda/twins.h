/* twins.h - two caches of one scheme, on the CPU and on the GPU, that get the same calls. For every
 * block of every sequence both have to export the same bytes: pages, states, centres, scales. */
#ifndef KVANT_TESTS_TWINS_H
#define KVANT_TESTS_TWINS_H

#include "attention_fixture.h"

#include <kvant/cache.h>

#ifndef TWINS_DIM
#define TWINS_DIM 64
#endif

enum {
    LAYERS = 2,
    HEADS = 8,
    KV_HEADS = 2,
    DIM = TWINS_DIM,
    WIDTH = KV_HEADS * DIM,
    Q_WIDTH = HEADS * DIM
};
enum { MOST = 640, SEQUENCES = 4 };

/* The programs of each head_dim run at the same time in one folder. */
#define TEXT_OF(x) #x
#define FILE_OF(dim) "test_cuda_cache_" TEXT_OF(dim) ".kvcal"
#define CALIBRATION FILE_OF(TWINS_DIM)

typedef struct spec_pair {
    const char *k, *v;
    const char *transformed; /* codec with the same pages for keys after transform=file, or NULL */
    bool calibrated;
    bool decoded; /* the reference reads the pages as fp16 */
    bool asynchronous;
    const char *preset;  /* preset with these codecs, or NULL */
    uint32_t max_tokens; /* 0: MOST */
} spec_pair;

typedef struct twins {
    const spec_pair *spec;
    kvant_scheme *scheme;
    kvant_cache *cpu, *gpu;
    uint32_t dropped[SEQUENCES]; /* number of dropped blocks */
    uint8_t *of_cpu, *of_gpu;    /* exported bytes */
    size_t room;
    double worst;
    uint32_t most_parts; /* largest number of transforms in one call of attention */
    uint32_t waited;     /* blocks whose rows were pending when attention read them */
} twins;

void twins_new(twins *t, const spec_pair *spec, uint32_t n_sequences);
void twins_free(twins *t);

/* transform=first: both caches get a matrix, from rows of sequences that are then removed. */
void twins_learn(twins *t);

uint32_t twins_length(const twins *t, int32_t s);
const kvant_codec *const *twins_codecs(twins *t, uint32_t layer, kvant_role role);

float *random_rows(size_t n, float size);
/* Rows to append. With a calibration they are distributed like its rows, so that scores and outputs
 * have the size that it expects. */
float *twins_rows(const twins *t, size_t n, float size);

/* Appends rows of one layer; returns the status, which both caches give. */
kvant_status twins_append_rows(twins *t, int32_t s, uint32_t layer, const float *k, const float *v,
                               uint32_t n);
/* Appends random rows to every layer. Returns false if there is no room. */
bool twins_append(twins *t, int32_t s, uint32_t n);
/* Appends n tokens to each of the first n_sequences sequences in one call. */
bool twins_append_all(twins *t, uint32_t n_sequences, uint32_t n);

/* Exports a block of a cache to of_cpu or of_gpu; returns its size. */
size_t twins_export_from(const twins *t, const kvant_cache *cache, int32_t s, uint32_t block,
                         uint8_t *to);

/* Exports a block into of_cpu and of_gpu, which have to be equal; returns their size. */
size_t twins_export(twins *t, int32_t s, uint32_t block);
/* Compares every block of every sequence, and the sizes that the caches report. */
void twins_compare(twins *t);

/* Attends with random queries to a layer on the GPU (twins_attention.c). Outputs must lie within
 * the bound that attention_bound.c derives for a softmax in binary64 over the rows of the exported
 * bytes. */
void twins_attend(twins *t, int32_t s, uint32_t layer, const attention_problem *problem);
/* Decode steps in rounds, each against a softmax over rows; rows that are read back
 * (twins_steps.c). */
void twins_steps(const spec_pair *spec);
void twins_read(twins *t, int32_t s);
/* A preset's cache: which rows are exact, and that codes equal the CPU's (twins_exact.c). */
void twins_exact(const spec_pair *spec);
void twins_plain_keys(void);
/* Blocks of two caches that learned from different rows, in one cache (twins_transforms.c). */
void twins_transforms(const spec_pair *spec);
/* The same with values of another scale, which a GPU does not support. */
void twins_scales(const spec_pair *spec);
/* Makes at most `most` decode steps of two sequences. */
void twins_take_steps(twins *t, uint32_t most, uint32_t window);
/* Rows that a codec could hold, but that fp16 cannot, are refused. */
void twins_beyond_half(const spec_pair *spec);
/* Attention of the n newest tokens, against a softmax over rows. */
void twins_attend_rows(twins *t, int32_t s, uint32_t n);

kvant_attention_problem problem_of(const fixture *f, uint32_t n, void *q, void *out);

#endif
