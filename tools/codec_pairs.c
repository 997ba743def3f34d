#include "codec_pairs.h"

#include "command.h"

bool codec_pairs_add_k(codec_pairs *list, const char *spec)
{
    if (list->n == MAX_PAIRS)
        return complain("more than %d codecs", MAX_PAIRS);
    list->items[list->n++] = (codec_pair){ spec, spec };
    return true;
}

bool codec_pairs_add_v(codec_pairs *list, const char *spec)
{
    if (list->n == 0) {
        complain("-v %s has no -k before it", spec);
        return hint("give them in pairs: -k SPEC -v SPEC");
    }
    list->items[list->n - 1].v = spec;
    return true;
}

void codec_pairs_default(codec_pairs *list, const char *const *specs, size_t n)
{
    if (list->n > 0)
        return;
    for (size_t i = 0; i < n; i++)
        list->items[list->n++] = (codec_pair){ specs[i], specs[i] };
}
