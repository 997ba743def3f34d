/* choices.c - see choices.h. */
#include "choices.h"

#include "command.h"

#include <stdio.h>
#include <string.h>

const char *file_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

/* The library's reasons begin with the word that they are about. */
static bool begins(const char *why, const char *word)
{
    const size_t n = word != NULL ? strlen(word) : 0;
    return word != NULL && strncmp(why, word, n) == 0 && why[n] == ':';
}

static bool refused(const kvant_scheme_params *p, kvant_status status)
{
    const struct {
        const char *option, *word;
    } options[] = { { "-k", p->k },
                    { "-v", p->v },
                    { "--protect-codec", p->protect_codec },
                    { "--config", p->settings },
                    { "--calibration", p->calibration } };
    const char *why = kvant_error_message(), *option = p->preset != NULL ? "--preset:" : "the cache:";
    for (size_t i = 0; i < sizeof options / sizeof *options; i++)
        if (begins(why, options[i].word)) {
            option = options[i].option;
            break;
        }
    complain("%s %s", option, why);
    if (strcmp(option, "--config") == 0)
        return hint("kvant tune makes such files; one belongs to one model and one calibration");
    if (strcmp(option, "--calibration") == 0)
        return hint("kvant calibrate -m MODEL -f TEXT -o FILE makes one");
    if (status == KVANT_ERR_UNSUPPORTED && p->calibration == NULL)
        return hint("--calibration FILE, where a codec needs one; kvant codecs lists what there is");
    return hint("kvant codecs lists what there is");
}

static void tell(const kvant_scheme_params *p, const kvant_scheme *scheme, bool *told)
{
    const kvant_scheme_info info = scheme_info(scheme);
    if (*told || p->calibration != NULL || (info.calibration_path == NULL && info.not_used == NULL))
        return;
    *told = true;
    if (info.not_used == NULL) {
        fprintf(stderr, "kvant: using the calibration %s\n", info.calibration_path);
        return;
    }
    complain("%s", info.not_used);
    hint("--calibration FILE takes it all the same, if it fits; kvant calibrate makes it anew");
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
