/* common.c - see common.h. */
#include "common.h"

#define MAX_KEPT 65536u /* tokens; a larger number is a mistake, because fp16 rows save nothing */

static const char *const rotate_names[] = { "none", "hadamard", "dense", NULL }; /* kvant_rotate */
static const char *const sign_names[] = { "none", "seed", NULL };
/* kvant_order */
static const char *const order_names[] = { "stored", "halves", "pairs", "dealt", NULL };
static const char *const weighting_names[] = { "none", "diagonal", "file", "first", NULL };
static const char *const place_names[] = { "none", "first", "file",
                                           NULL }; /* kvant_center, kvant_norm */

#define CHOICE(name, words, text) KVANT_CHOICE(kvant_common, name, words, KVANT_OPTION_ABSENT, text)
#define NUMBER(name, least, most, text)                                                            \
    KVANT_NUMBER(kvant_common, name, least, most, KVANT_OPTION_ABSENT, text)

#define ROTATION                                                                                   \
    CHOICE(rotate, rotate_names, "rotation of rows before they are quantised"),                    \
        NUMBER(block, 1, KVANT_MAX_HEAD_DIM, "size of Hadamard blocks, a power of two"),           \
        CHOICE(signs, sign_names, "signs of channels before a Hadamard rotation")
#define AFFINE                                                                                     \
    CHOICE(transform, weighting_names,                                                             \
           "matrix on keys, of a calibration, or on keys or values, of the first rows"),           \
        KVANT_FLAG(kvant_common, feedback,                                                         \
                   "steer rounding errors away from what queries read; with transform=file"),      \
        CHOICE(center, place_names, "where the centre per channel comes from"),                    \
        CHOICE(norm, place_names, "where the scale per channel comes from")
#define KEPT                                                                                       \
    NUMBER(sink, 0, MAX_KEPT, "first tokens that stay fp16"),                                      \
        NUMBER(recent, 0, MAX_KEPT, "newest tokens that stay fp16"),                               \
    {                                                                                              \
        "seed", KVANT_OPTION_SEED, NULL, 0, 0, 0, offsetof(kvant_common, seed),                    \
            "of random signs and matrices"                                                         \
    }

const kvant_option kvant_common_options_ordered[] = {
    ROTATION,
    CHOICE(order, order_names, "order in which chunks and groups take the channels of keys"),
    AFFINE,
    KEPT,
    { .key = NULL },
};

const kvant_option kvant_common_options[] = { ROTATION, AFFINE, KEPT, { .key = NULL } };

const kvant_option kvant_common_options_uncentred[] = { ROTATION, KEPT, { .key = NULL } };

/* Returns the value of an option and sets *shown for the canonical spec. An option that is 0 and
 * has no preset is not shown. */
static int32_t apply(int32_t asked, uint32_t preset, int32_t *shown)
{
    int32_t value = asked == KVANT_OPTION_ABSENT ? (int32_t)preset : asked;
    *shown = value || preset ? value : KVANT_OPTION_ABSENT;
    return value;
}

void kvant_common_apply(const kvant_common *common, kvant_codec_info *info, kvant_common *shown)
{
    info->center = (kvant_center)apply(common->center, info->center, &shown->center);
    info->norm = (kvant_norm)apply(common->norm, info->norm, &shown->norm);
    if (info->center != KVANT_CENTER_NONE && info->sink_tokens < KVANT_CENTER_SINK)
        info->sink_tokens = KVANT_CENTER_SINK;
    info->sink_tokens = (uint32_t)apply(common->sink, info->sink_tokens, &shown->sink);
    info->recent_tokens = (uint32_t)apply(common->recent, info->recent_tokens, &shown->recent);
}
