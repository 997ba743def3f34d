/* choices.h - what the user chose for the cache, as a scheme of the library. */
#pragma once

#include <kvant/calibration.h>
#include <kvant/scheme.h>
#include <stdbool.h>
#include <stddef.h>

/* Calls kvant_scheme_create() and explains an error to people: it names the option that the reason
 * belongs to, and adds a hint. Unless *told is set, it also prints which calibration next to the
 * model is used, or why none is. False after complaining. */
bool scheme_make(const kvant_scheme_params *params, kvant_scheme **scheme, bool *told);

/* Whether `value` is the text of the environment's variable itself and not a copy of it. */
bool choice_is_from(const char *value, const char *variable);

/* The file where commands look for a model's calibration: model.kvcal next to model.gguf. False
 * when the path is too long. */
bool calibration_beside(const char *model, char *path, size_t bytes);

/* Makes a calibration of one layer, with 256 clusters, from n rows of keys and n rows of values;
 * each row has n_kv_heads x head_dim floats. `queries`: n rows, or NULL. NULL without memory. */
kvant_calibration *calibration_of(const float *const *rows, uint32_t n, uint32_t n_kv_heads,
                                  uint32_t head_dim, const float *queries);

/* Families at their widths, in the order of the library: specs without options. Their number. */
enum { MAX_CODEC_NAMES = 512, CODEC_NAME_BYTES = 48 };
typedef struct codec_name {
    char text[CODEC_NAME_BYTES];
    kvant_codec_family family;
} codec_name;
size_t codec_names(codec_name *names);

/* The info of a scheme. */
kvant_scheme_info scheme_info(const kvant_scheme *scheme);
