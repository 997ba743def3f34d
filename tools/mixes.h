/* mixes.h - the choices for the kv heads of one layer and role: one candidate for all kv heads, or
 * a mix, in which each kv head has its own candidate.
 *
 * There are too many mixes to list. The kept mixes are those that some budget for this site alone
 * would choose. From the smallest candidates on, each step changes the kv head that saves most
 * error per byte. The candidates of a mix fit together in one cache.
 */
#ifndef KVANT_TOOLS_MIXES_H
#define KVANT_TOOLS_MIXES_H

#include <kvant/codec.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct mix {
    double bytes, error;  /* of the whole site */
    const uint8_t *heads; /* the candidate of each kv head */
} mix;

/* The first n_candidates have candidate i in all kv heads. */
typedef struct mixes {
    mix *list;
    size_t n;
    uint8_t *heads; /* that the list points to */
} mixes;

typedef struct mixes_candidates {
    const kvant_codec_info *infos; /* of n_candidates, at most 256 */
    const double *bytes;           /* of one kv head with each of them */
    const double *errors;          /* [candidate][kv head] */
    size_t n_candidates;
    uint32_t n_kv_heads;
} mixes_candidates;

/* False when memory runs out; mixes_free in any case. */
bool mixes_make(mixes *m, const mixes_candidates *of);
void mixes_free(mixes *m);

#endif /* KVANT_TOOLS_MIXES_H */
