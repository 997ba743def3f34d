/* distortion.h - what `kvant bench distortion` is made of: cells of the papers' tables, and probes
 * that measure codecs.
 *
 * A cell names what a paper printed, the codec it was printed for and how it was measured. Cells
 * that need the same measurement share one probe, so a table of four columns encodes its rows once.
 */
#ifndef KVANT_TOOLS_DISTORTION_H
#define KVANT_TOOLS_DISTORTION_H

#include "progress.h"

#include <kvant/codec.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How rows and queries are drawn. All of head_dim 128, keys. */
typedef enum setup_id {
    SETUP_INFO,     /* nothing is drawn: sizes */
    SETUP_FIDELITY, /* OCTOPUS Table 1 and TurboQuant's theorems */
    SETUP_SPLIT,    /* OCTOPUS Table 4 */
    SETUP_ROUNDING, /* OCTOPUS Table 5 */
    SETUP_NEEDLE,   /* OCTOPUS section 4.1 */
    SETUP_CODEBOOK, /* levels of a scalar codebook, read off decoded rows of known scale */
    SETUP_COVERING, /* directions of quaternions */
} setup_id;

/* One number a seed. */
typedef enum series_id {
    SERIES_COS,       /* <k, k'> / |k||k'|, mean over keys */
    SERIES_MSE,       /* |k - k'|^2 / head_dim */
    SERIES_RELATIVE,  /* |k - k'|^2 / |k|^2 */
    SERIES_TAIL95,    /* 95th percentile of the former over keys */
    SERIES_SLOPE,     /* <k, k'> / |k|^2: what inner products shrink to */
    SERIES_IP_ABS,    /* |<q, k> - score| */
    SERIES_IP_SQUARE, /* head_dim (<q, k> - score)^2 / |q|^2 |k|^2 */
    SERIES_NEEDLE,    /* softmax weight of the needle */
    SERIES_LEVEL_LOW, /* smallest positive level of a codebook */
    SERIES_LEVEL_HIGH,
    SERIES_ENTROPY,   /* of the codes, in bits */
    SERIES_CODEWORDS, /* distinct directions */
    SERIES_ANGLE_MEAN,
    SERIES_ANGLE_MAX, /* of a random direction to the nearest codeword, radians */
    N_SERIES
} series_id;

enum { DISTORTION_HEAD_DIM = 128, DISTORTION_MAX_SEEDS = 128 };

typedef struct probe {
    const char *spec;
    setup_id setup;
    bool quick;
    uint32_t n_seeds;  /* measured */
    bool done;         /* all seeds */
    char problem[192]; /* why there is nothing: the codec is missing, or refused its rows */
    double nominal_bits, true_bits;
    double series[N_SERIES][DISTORTION_MAX_SEEDS];
} probe;

/* Rows that probe_run will encode: the unit of progress. */
double probe_work(const probe *p);

/* Measures. False when interrupted; a codec that cannot be had is no failure but leaves a
 * problem. */
bool probe_run(probe *p, progress *progress);

/* Normal numbers, the same for every codec of a setup and seed. */
typedef struct noise {
    uint64_t state;
    double spare;
    bool has_spare;
} noise;

noise noise_start(setup_id setup, uint32_t seed);
float noise_normal(noise *n);

/* distortion_quaternion.c: the series of SETUP_COVERING for one seed. False when the codec
 * refused. */
bool quaternion_measure(const kvant_codec *codec, uint32_t seed, uint32_t n_directions, probe *p);

/* distortion_specs.c: measures and prints the errors of each codec. An exit code. */
int distortion_of_specs(const char *const *specs, size_t n, bool quick, bool json);

typedef enum metric_id {
    METRIC_MEAN,          /* of the series */
    METRIC_ONE_MINUS,     /* 1 - mean */
    METRIC_ROOT,          /* square root of the mean */
    METRIC_DIFFERENCE,    /* to the reference codec, seed by seed */
    METRIC_CHANGE,        /* per cent against the reference codec, seed by seed */
    METRIC_CHANGE_OF_GAP, /* the same of 1 - series */
    METRIC_EXPONENT,      /* d log series / d log codewords between reference and codec */
    METRIC_NOMINAL_BITS,
    METRIC_TRUE_BITS,
    METRIC_TIMES_SMALLER, /* than fp16, at nominal bits */
    METRIC_GIGABYTES_70B, /* Llama-3-70B (80 layers, 8 kv heads, head_dim 128) at 131,072 tokens, nominal bits */
    METRIC_GIGABYTES_7B,  /* Mistral-7B (32 layers, 8 kv heads, head_dim 128) at 32,768 tokens */
} metric_id;

typedef struct paper_cell {
    const char *table, *row, *column;
    const char *paper; /* as printed; its last digit tells how exact it is */
    const char *spec;
    setup_id setup;
    metric_id metric;
    series_id series;
    const char *reference; /* spec of METRIC_CHANGE... and METRIC_EXPONENT */
    bool at_least;         /* paper is a lower bound */
    bool at_most;          /* or an upper one */
    /* Of cells that cannot be met: why (docs/distortion.md has the evidence), and the figure to be
     * met instead, from there. A reason without a figure would excuse anything. */
    const char *note, *expected;
} paper_cell;

extern const paper_cell paper_cells[];
extern const size_t n_paper_cells;

#endif /* KVANT_TOOLS_DISTORTION_H */
