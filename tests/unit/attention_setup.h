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
    bool codec_per_head; /* every kv head has its own codec: one spec, rotated with another seed */
    bool centred;        /* rows have no common mean */
    float softcap, max_bias;
} setup;

typedef struct fixture {
    setup s;
    kvant_codec *k_codecs[MAX_KV_HEADS], *v_codecs[MAX_KV_HEADS];
    void *k_memory, *v_memory;
    kvant_tensor *k, *v;
    uint32_t blocks; /* blocks of each sequence */
    attention_data data;
    kvant_attention_problem problem;
} fixture;

fixture make_fixture(setup s);
void free_fixture(fixture *f);

/* Fills outputs and workspace with NaNs before attention, so that a read of memory that was not
 * written shows. */
void run(fixture *f);

/* Checks every output of the last run. */
void check(const fixture *f);

/* Runs and checks at every CPU level of the machine. */
void check_setup(setup s);

#endif
