/* uniform.h - uniform quantisation in groups: the quantiser of int, bdr, innerq and kivi codecs.
 *
 * A group is a run of neighbouring channels of one token, or of neighbouring tokens of one channel.
 * Each group has a scale; asymmetric groups also have a zero point. uniform.c encodes and decodes,
 * uniform_unpack.c unpacks pages for attention. Families decide which groups and modes a spec
 * means. format.md, "Uniform codes", has the formulas. */
#pragma once

#include <math.h>

#include "codec_internal.h"

/* How a group's range becomes levels. A group of a hybrid codec is symmetric or asymmetric,
 * whichever has the smaller error. PAPER follows InnerQ's text: asymmetric levels of all bits,
 * squared errors. CODE follows the authors' program: asymmetric levels of one bit less, absolute
 * errors. */
typedef enum kvant_uniform_mode {
    KVANT_UNIFORM_ASYM,
    KVANT_UNIFORM_SYM,
    KVANT_UNIFORM_HYBRID_PAPER,
    KVANT_UNIFORM_HYBRID_CODE
} kvant_uniform_mode;

typedef struct kvant_uniform {
    kvant_uniform_mode mode;
    bool per_channel; /* groups of tokens, 16, 32 or 64 */
    uint32_t group,
        n_groups; /* groups a token or, per channel, a page; the last of a token may be smaller */
    float sym_levels;  /* the largest magnitude of a symmetric level, 2^(bits-1) - 1 */
    float asym_levels; /* the largest asymmetric level */
    float bias;        /* code of the symmetric level 0, 2^(bits-1) */
    bool symmetric;    /* mode is KVANT_UNIFORM_SYM: no zero points */
} kvant_uniform;

static inline const kvant_uniform *kvant_uniform_of(const kvant_codec *codec)
{
    return codec->state;
}

static inline bool kvant_uniform_is_hybrid(const kvant_uniform *u)
{
    return u->mode == KVANT_UNIFORM_HYBRID_PAPER || u->mode == KVANT_UNIFORM_HYBRID_CODE;
}

/* Makes a codec uniform after its transform is set: checks group, fills state, sizes and quantiser.
 * With group 0 a group is all channels of a token, or 32 tokens with per_channel. There are 2 to 8
 * bits. KVANT_ERR_SPEC: the group is not possible. */
kvant_status kvant_uniform_init(kvant_codec *codec, uint32_t bits, kvant_uniform_mode mode,
                                bool per_channel, uint32_t group, const kvant_error *error);

/* group=N of families whose groups are channels of a token. */
#define KVANT_GROUP_OPTION(type)                                                                   \
    KVANT_NUMBER(type, group, 1, KVANT_MAX_HEAD_DIM, 0, "numbers that share a scale")

/* hybrid, hybrid=paper, hybrid=code; without them KVANT_OPTION_ABSENT. */
#define KVANT_HYBRID_OPTION(type)                                                                  \
    { "hybrid",                                                                                    \
      KVANT_OPTION_FLAG_OR_CHOICE,                                                                 \
      kvant_hybrid_names,                                                                          \
      0,                                                                                           \
      0,                                                                                           \
      KVANT_OPTION_ABSENT,                                                                         \
      offsetof(type, hybrid),                                                                      \
      "each group takes the better of sym and asym, as the paper or as its authors' program" }
extern const char *const kvant_hybrid_names[];

static inline kvant_uniform_mode kvant_uniform_hybrid(int32_t choice)
{
    return choice == 0 ? KVANT_UNIFORM_HYBRID_PAPER : KVANT_UNIFORM_HYBRID_CODE;
}

/* group=N of families whose groups are channels in one role and tokens in the opposite role. N is
 * 16, 32 or 64, stored as log2(N / 16). */
#define KVANT_TILES_OPTION(type)                                                                   \
    KVANT_CHOICE(type, group, kvant_tile_names, 1, "numbers that share a scale")
extern const char *const kvant_tile_names[];

/* Bits per number as InnerQ's Table 3 counts: a code, and its share of a full group's fp16 scale
 * and, unless symmetric, zero point. */
static inline double kvant_uniform_nominal_bits(const kvant_codec *codec)
{
    const kvant_uniform *u = kvant_uniform_of(codec);
    return codec->info.bits + (u->mode == KVANT_UNIFORM_SYM ? 16.0 : 32.0) / u->group;
}

/* The index of the scale of (token, channel) in the page's metadata. Its zero point has this index
 * plus kvant_uniform_n_scales. */
static inline size_t kvant_uniform_index(const kvant_codec *codec, uint32_t token, uint32_t channel)
{
    const kvant_uniform *u = kvant_uniform_of(codec);
    return u->per_channel ? (size_t)(token / u->group) * codec->layout.padded_dim + channel
                          : (size_t)(channel / u->group) * KVANT_PAGE_TOKENS + token;
}

static inline size_t kvant_uniform_n_scales(const kvant_codec *codec)
{
    const kvant_uniform *u = kvant_uniform_of(codec);
    return (size_t)u->n_groups * (u->per_channel ? codec->layout.padded_dim : KVANT_PAGE_TOKENS);
}

/* A number of a group is scale * code + zero in every mode. For a symmetric level, which is code -
 * bias, zero is -scale * bias. The products scale * code and scale * bias have at most 19 bits, so
 * the sum is exactly scale * (code - bias). */
typedef struct kvant_uniform_line {
    float scale, zero;
} kvant_uniform_line;

/* The line of a stored group. `stored` is the bits of the stored scale, whose sign marks asymmetric
 * groups of a hybrid codec. The arguments scale and zero are the stored numbers as floats. zero is
 * ignored if the codec stores no zero point. */
static inline kvant_uniform_line kvant_uniform_line_of(const kvant_uniform *u, uint16_t stored,
                                                       float scale, float zero)
{
    bool asymmetric =
        u->mode == KVANT_UNIFORM_ASYM || (u->mode != KVANT_UNIFORM_SYM && stored >> 15);
    float size = kvant_uniform_is_hybrid(u) ? fabsf(scale) : scale;
    return (kvant_uniform_line){ size, asymmetric ? zero : -size * u->bias };
}

void kvant_uniform_unpack(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                          float *tile);

/* The same for codes that count from -bias: their values are code - bias. */
void kvant_uniform_lines(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                         kvant_code_lines *lines);
