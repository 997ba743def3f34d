/* twins.h - two caches under one scheme, on the CPU and on the GPU, that get the same calls. Every
 * block of every sequence has to export the same bytes from both: pages, states, centres, scales. */
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

/* The programs of each head_dim run side by side in one folder. */
#define TEXT_OF(x) #x
#define FILE_OF(dim) "test_cuda_cache_" TEXT_OF(dim) ".kvcal"
#define CALIBRATION FILE_OF(TWINS_DIM)

typedef struct spec_pair {
    const char *k, *v;
    const char *transformed; /* codec of the same pages for keys behind transform=file, or NULL */
    bool calibrated;
    bool decoded; /* the reference reads the pages decoded to fp16 */
    bool asynchronous;
    const char *preset;  /* of these codecs, or NULL */
    uint32_t max_tokens; /* 0: MOST */
} spec_pair;

typedef struct twins {
    const spec_pair *spec;
    kvant_scheme *scheme;
    kvant_cache *cpu, *gpu;
    uint32_t dropped[SEQUENCES]; /* blocks */
    uint8_t *of_cpu, *of_gpu;    /* exports */
    size_t room;
    double worst;
    uint32_t most_parts; /* versions in one call of attention */
    uint32_t waited;     /* blocks whose rows waited when attention read them */
} twins;

void twins_new(twins *t, const spec_pair *spec, uint32_t n_sequences);
void twins_free(twins *t);

/* transform=first: both caches get a matrix, from rows of sequences that are gone again. */
void twins_learn(twins *t);

uint32_t twins_length(const twins *t, int32_t s);
const kvant_codec *const *twins_codecs(twins *t, uint32_t layer, kvant_role role);

float *random_rows(size_t n, float size);
/* Rows to append: with a calibration like its own rows, so that scores and outputs are of the size
 * that it expects. */
float *twins_rows(const twins *t, size_t n, float size);

/* Rows of one layer, with the status that both caches give. */
kvant_status twins_append_rows(twins *t, int32_t s, uint32_t layer, const float *k, const float *v,
                               uint32_t n);
/* Random rows of every layer. False when there is no room. */
bool twins_append(twins *t, int32_t s, uint32_t n);
/* n of each of the first so many sequences in one call. */
bool twins_append_all(twins *t, uint32_t n_sequences, uint32_t n);

/* A block into of_cpu and of_gpu, which have to be equal; returns how many bytes. */
size_t twins_export(twins *t, int32_t s, uint32_t block);
/* Every block of every sequence, and what the caches say of their memory. */
void twins_compare(twins *t);

/* Random queries to a layer on the GPU (twins_attention.c). Outputs are within the bound that
 * attention_bound.c derives for a softmax in binary64 over the rows of the exported bytes. */
void twins_attend(twins *t, int32_t s, uint32_t layer, const attention_problem *problem);
/* Decode steps in rounds, each against a softmax over rows; rows that are read back (twins_steps.c). */
void twins_steps(const spec_pair *spec);
void twins_read(twins *t, int32_t s);
/* A preset's cache: which rows are exact, and that codes are the CPU's (twins_exact.c). */
void twins_exact(const spec_pair *spec);
void twins_plain_keys(void);
/* Blocks of two caches that learnt from different rows, in one cache (twins_versions.c). */
void twins_versions(const spec_pair *spec);
/* The same where values have another scale, which a GPU does not take. */
void twins_scales(const spec_pair *spec);
/* At most so many decode steps of two sequences. */
void twins_take_steps(twins *t, uint32_t most, uint32_t window);
/* Rows that a codec could hold, but not fp16, are refused. */
void twins_beyond_half(const spec_pair *spec);
/* n newest tokens' attention, against a softmax over rows. */
void twins_attend_rows(twins *t, int32_t s, uint32_t n);

kvant_attention_problem problem_of(const fixture *f, uint32_t n, void *q, void *out);

#endif
