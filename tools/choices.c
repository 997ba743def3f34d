/* choices.c - see choices.h. */
#include "choices.h"

#include "args.h"
#include "command.h"
#include "os.h"
#include "plugin.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool calibration_beside(const char *model, char *path, size_t bytes)
{
    const size_t length = strlen(model), ending = strlen(".gguf");
    const bool has_ending = length > ending && strcmp(model + length - ending, ".gguf") == 0;
    return snprintf(path, bytes, "%.*s.kvcal", (int)(has_ending ? length - ending : length),
                    model) < (int)bytes;
}

/* The library's reasons begin with the word that they are about. */
static bool begins(const char *why, const char *word)
{
    const size_t n = word != NULL ? strlen(word) : 0;
    return word != NULL && strncmp(why, word, n) == 0 && why[n] == ':';
}

/* A name of llama.cpp's formats: q4_0, iq4_nl. */
static bool is_stock_type(const char *word)
{
    word += word[0] == 'i';
    return word[0] == 'q' && isdigit((unsigned char)word[1]) && strchr(word, '_') != NULL;
}

size_t codec_names(codec_name *names)
{
    size_t n = 0;
    for (size_t i = 0; i < kvant_codec_family_count(); i++) {
        kvant_codec_family family = { .size = sizeof family, .variants = "" };
        kvant_codec_family_get(i, &family);
        const char *variant = family.variants;
        do {
            const size_t length = strcspn(variant, " ");
            names[n].family = family;
            snprintf(names[n++].text, CODEC_NAME_BYTES, "%s%s%.*s", family.name, length ? "-" : "",
                     (int)length, variant);
            variant += length + strspn(variant + length, " ");
        } while (*variant != 0 && n < MAX_CODEC_NAMES);
    }
    return n;
}

/* For a spec that was refused: what may have been meant. */
static void suggest(const char *spec)
{
    static codec_name names[MAX_CODEC_NAMES];
    char word[CODEC_NAME_BYTES];
    const char *pointers[MAX_CODEC_NAMES], *options = spec + strcspn(spec, ":");
    kvant_preset preset = { .size = sizeof preset };
    const size_t n = codec_names(names);
    snprintf(word, sizeof word, "%.*s", (int)(options - spec), spec);
    for (size_t i = 0; i < n; i++)
        pointers[i] = names[i].text;
    const char *closest = args_closest(word, pointers, n);
    if (is_stock_type(word))
        hint("%s is a type of llama.cpp's own cache: use --stock %s, or kvant exec --accel -- "
             "PROGRAM -ctk %s -ctv %s",
             word, word, word, word);
    else if (kvant_preset_get(spec, 0, &preset) == KVANT_OK)
        hint("did you mean --preset %s?", spec);
    else if (closest != NULL && strcmp(closest, word) != 0)
        hint("did you mean '%s%s'?", closest, options);
}

/* Compares addresses, because only the environment's own text can be told apart from a copy. */
bool choice_is_from(const char *value, const char *variable)
{
    return value != NULL && value == getenv(variable);
}

static bool refused(const kvant_scheme_params *p, kvant_status status)
{
    const struct {
        const char *option, *variable, *word;
    } options[] = { { "-k", PLUGIN_ENV_K, p->k },
                    { "-v", PLUGIN_ENV_V, p->v },
                    { "--protect-codec", PLUGIN_ENV_PROTECT_CODEC, p->protect_codec },
                    { "--config", PLUGIN_ENV_CONFIG, p->settings },
                    { "--calibration", PLUGIN_ENV_CALIBRATION, p->calibration } };
    static const char *const presets[] = { "quality", "balanced", "small", "tiny" };
    const char *why = kvant_error_message(), *word = NULL, *option = "the cache:", *variable = NULL;
    if (p->preset != NULL)
        option = choice_is_from(p->preset, PLUGIN_ENV_PRESET) ? PLUGIN_ENV_PRESET ":" : "--preset:";
    for (size_t i = 0; i < sizeof options / sizeof *options && word == NULL; i++)
        if (begins(why, options[i].word)) {
            option = options[i].option;
            word = options[i].word;
            variable = choice_is_from(word, options[i].variable) ? options[i].variable : NULL;
        }
    if (variable != NULL)
        complain("%s=%s", variable, why);
    else
        complain("%s %s", option, why);
    if (word != NULL && strstr(why, "there is no codec") != NULL)
        suggest(word);
    const char *closest = p->preset != NULL ? args_closest(p->preset, presets, 4) : NULL;
    if (closest != NULL && strcmp(closest, p->preset) != 0)
        hint("did you mean '%s'?", closest);
    if (strcmp(option, "--config") == 0)
        return hint(
            "kvant tune makes settings files; each belongs to one model and one calibration");
    if (strcmp(option, "--calibration") == 0)
        return hint("make one with kvant calibrate -m MODEL -f TEXT -o FILE");
    if (status == KVANT_ERR_UNSUPPORTED && p->calibration == NULL)
        return hint(
            "give --calibration FILE if the codec needs one; kvant codecs lists all codecs");
    return hint("kvant codecs lists all codecs");
}

static void tell(const kvant_scheme_params *p, const kvant_scheme *scheme, bool *told)
{
    const kvant_scheme_info info = scheme_info(scheme);
    if (*told || p->calibration != NULL || (info.calibration_path == NULL && info.not_used == NULL))
        return;
    *told = true;
    if (info.not_used == NULL) {
        report_line("kvant: ", "using the calibration %s", info.calibration_path);
        return;
    }
    complain("%s", info.not_used);
    hint("--calibration FILE uses it anyway if it fits; kvant calibrate makes a new one");
}

bool scheme_make(const kvant_scheme_params *params, kvant_scheme **scheme, bool *told)
{
    const kvant_status status = kvant_scheme_create(params, scheme);
    if (status != KVANT_OK)
        return refused(params, status);
    tell(params, *scheme, told);
    return true;
}

kvant_scheme_info scheme_info(const kvant_scheme *scheme)
{
    kvant_scheme_info info = { .size = sizeof info };
    kvant_scheme_get_info(scheme, &info);
    return info;
}

kvant_calibration *calibration_of(const float *const *rows, uint32_t n, uint32_t n_kv_heads,
                                  uint32_t head_dim, const float *queries)
{
    static const uint32_t clusters[] = { 256 };
    const kvant_calibrator_config config = { .size = sizeof config,
                                             .clusters = clusters,
                                             .n_codebooks = 1 };
    const size_t width = (size_t)n_kv_heads * head_dim;
    kvant_calibrator *made = NULL;
    kvant_calibration *calibration = NULL;
    uint32_t left = 1;
    bool ok = kvant_calibrator_create(&config, &made, NULL, 0) == KVANT_OK;
    for (uint32_t role = 0; ok && role < 2; role++)
        ok = kvant_calibrator_add_rows(made, 0, (kvant_role)role, n_kv_heads, head_dim, rows[role],
                                       width, n) == KVANT_OK;
    for (uint32_t head = 0; ok && queries != NULL && head < n_kv_heads; head++)
        ok = kvant_calibrator_add_queries(made, 0, head, head_dim, queries + head * head_dim, width,
                                          n) == KVANT_OK;
    while (ok && left > 0)
        ok = kvant_calibrator_cluster(made, &left) == KVANT_OK;
    if (ok)
        kvant_calibrator_finish(made, &calibration);
    kvant_calibrator_free(&made);
    return calibration;
}
