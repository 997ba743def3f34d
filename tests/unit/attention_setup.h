/* attention_setup.h - kvant_attention on tensors of random rows. Outputs are compared with a plain
 * softmax in double precision over the decoded rows, within a derived bound. */
#ifndef KVANT_TESTS_ATTENTION_SETUP_H
#define KVANT_TESTS_ATTENTION_SETUP_H

#include "attention_data.h"

enum { MAX_KV_HEADS = 4 };

typedef struct setup {
    uint32_t k_dim, v_dim, n_kv_heads, n_heads, n_tokens, n_queries, n_sequences;
    const char *k_spec, *v_spec;
    bool mask, sinks, exact;
    bool codec_per_head; /* of one spec, rotated by seeds of their own */
    bool centred;        /* rows without a mean */
    float softcap, max_bias;
} setup;

typedef struct fixture {
    setup s;
    kvant_codec *k_codecs[MAX_KV_HEADS], *v_codecs[MAX_KV_HEADS];
    void *k_memory, *v_memory;
    kvant_tensor *k, *v;
    uint32_t blocks; /* of a sequence */
    attention_data data;
    kvant_attention_problem problem;
} fixture;

fixture make_fixture(setup s);
void free_fixture(fixture *f);

/* Into NaNs, with a workspace of NaNs: what was not written shows. */
void run(fixture *f);

/* Every output of the last run. */
void check(const fixture *f);

/* Runs and checks at every CPU level of the machine. */
void check_setup(setup s);

#endif
