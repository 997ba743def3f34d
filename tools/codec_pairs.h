/* codec_pairs.h - the codecs of a benchmark's command line, `-k SPEC [-v SPEC]`, in order. Commands
 * that drive llama.cpp use configs.h, which knows more of a cache than its two codecs. */
#ifndef KVANT_TOOLS_CODEC_PAIRS_H
#define KVANT_TOOLS_CODEC_PAIRS_H

#include <stdbool.h>
#include <stddef.h>

#define MAX_PAIRS 24

typedef struct codec_pair {
    const char *k, *v; /* from argv or constant */
} codec_pair;

typedef struct codec_pairs {
    codec_pair items[MAX_PAIRS];
    size_t n;
} codec_pairs;

/* Keys and, until -v follows, values. False after complaining. */
bool codec_pairs_add_k(codec_pairs *list, const char *spec);
bool codec_pairs_add_v(codec_pairs *list, const char *spec);

/* The n specs, at most MAX_PAIRS, for keys and values alike when nothing was given. */
void codec_pairs_default(codec_pairs *list, const char *const *specs, size_t n);

#endif /* KVANT_TOOLS_CODEC_PAIRS_H */
