/* mixes.c - see mixes.h. Each set of candidates that fit together gives one path; a kv head is a site of allocate.h. */
#include "mixes.h"

#include "allocate.h"

#include <math.h>
#include <stdlib.h>

/* The candidates that fit together with one of them. */
typedef struct kind {
    allocate_choice *choices; /* [kv head][n] */
    allocate_site *sites;     /* kv heads */
    uint8_t *candidates;      /* which they are */
    size_t n;
} kind;

static bool fits_an_earlier_one(const mixes_candidates *of, size_t candidate)
{
    for (size_t i = 0; i < candidate; i++)
        if (kvant_codecs_fit_together(&of->infos[i], &of->infos[candidate]))
            return true;
    return false;
}

static void collect(kind *k, const mixes_candidates *of, size_t first)
{
    k->n = 0;
    for (size_t i = first; i < of->n_candidates; i++)
        if (kvant_codecs_fit_together(&of->infos[first], &of->infos[i]))
            k->candidates[k->n++] = (uint8_t)i;
    for (uint32_t head = 0; head < of->n_kv_heads; head++) {
        allocate_choice *choices = k->choices + head * of->n_candidates;
        for (size_t i = 0; i < k->n; i++)
            choices[i] = (allocate_choice){ of->bytes[k->candidates[i]],
                                            of->errors[k->candidates[i] * of->n_kv_heads + head] };
        k->sites[head] = (allocate_site){ choices, k->n, 0 };
    }
}

/* Where the kv heads stand, unless they all have the same, which the list has already. */
static void add(mixes *m, const kind *k, uint32_t n_kv_heads)
{
    uint8_t *heads = m->heads + m->n * n_kv_heads;
    mix *to = &m->list[m->n];
    bool alike = true;
    *to = (mix){ 0, 0, heads };
    for (uint32_t head = 0; head < n_kv_heads; head++) {
        const allocate_site *s = &k->sites[head];
        to->bytes += s->choices[s->chosen].bytes;
        to->error += s->choices[s->chosen].loss;
        heads[head] = k->candidates[s->chosen];
        alike = alike && heads[head] == heads[0];
    }
    m->n += !alike;
}

static void add_uniform(mixes *m, const mixes_candidates *of, size_t candidate)
{
    uint8_t *heads = m->heads + m->n * of->n_kv_heads;
    mix *to = &m->list[m->n++];
    *to = (mix){ 0, 0, heads };
    for (uint32_t head = 0; head < of->n_kv_heads; head++) {
        heads[head] = (uint8_t)candidate;
        to->bytes += of->bytes[candidate];
        to->error += of->errors[candidate * of->n_kv_heads + head];
    }
}

static void walk(mixes *m, kind *k, const mixes_candidates *of, size_t first)
{
    collect(k, of, first);
    allocate_start(k->sites, of->n_kv_heads);
    do
        add(m, k, of->n_kv_heads);
    while (allocate_step(k->sites, of->n_kv_heads, INFINITY));
}

bool mixes_make(mixes *m, const mixes_candidates *of)
{
    /* A step makes one kv head larger, so all paths have no more than a point a candidate and kv head, and their beginnings. */
    const size_t most = of->n_candidates * (2 + (size_t)of->n_kv_heads);
    *m = (mixes){ calloc(most, sizeof *m->list), 0, calloc(most, of->n_kv_heads) };
    kind k = { calloc(of->n_kv_heads, of->n_candidates * sizeof *k.choices),
               calloc(of->n_kv_heads, sizeof *k.sites), calloc(of->n_candidates, 1), 0 };
    const bool ok =
        m->list != NULL && m->heads != NULL && k.choices != NULL && k.sites != NULL && k.candidates != NULL;
    for (size_t i = 0; ok && i < of->n_candidates; i++)
        add_uniform(m, of, i);
    for (size_t i = 0; ok && of->n_kv_heads > 1 && i < of->n_candidates; i++)
        if (!fits_an_earlier_one(of, i))
            walk(m, &k, of, i);
    free(k.choices);
    free(k.sites);
    free(k.candidates);
    return ok;
}

void mixes_free(mixes *m)
{
    free(m->list);
    free(m->heads);
    *m = (mixes){ .list = NULL };
}
