/* choices.h - what the user chose for the cache, as a scheme of the library. */
#ifndef KVANT_TOOLS_CHOICES_H
#define KVANT_TOOLS_CHOICES_H

#include <kvant/calibration.h>
#include <kvant/scheme.h>
#include <stdbool.h>
#include <stddef.h>

/* kvant_scheme_create with words for people: which option a reason belongs to, and a hint. Says, unless *told, which
 * calibration beside the model is used, or why not. False after complaining. */
bool scheme_make(const kvant_scheme_params *params, kvant_scheme **scheme, bool *told);

/* Whether a value of the params is the variable's, taken from the environment and not copied. */
bool choice_is_from(const char *value, const char *variable);

/* Where commands look for a model's calibration: model.kvcal beside model.gguf. False when the path is too long. */
bool calibration_beside(const char *model, char *path, size_t bytes);

/* A calibration of one layer from n rows of keys and of values, n_kv_heads x head_dim floats each,
 * with 256 clusters. queries: as many rows, or NULL. NULL without memory. */
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

/* What lies behind the last slash. */
const char *file_name(const char *path);

#endif /* KVANT_TOOLS_CHOICES_H */
