/* abi.c - see abi.h. */
#include "abi.h"

#include <string.h>

static bool all_zero(const unsigned char *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (bytes[i])
            return false;
    return true;
}

bool kvant_accept_struct(void *to, size_t size, const void *from, size_t least)
{
    size_t given;
    if (!from)
        return false;
    memcpy(&given, from, sizeof given);
    if (given < least ||
        (given > size && !all_zero((const unsigned char *)from + size, given - size)))
        return false;
    memset(to, 0, size);
    memcpy(to, from, given < size ? given : size);
    memcpy(to, &size, sizeof size);
    return true;
}

bool kvant_return_struct(void *to, const void *from, size_t size, size_t least)
{
    size_t given;
    if (!to)
        return false;
    memcpy(&given, to, sizeof given);
    if (given < least)
        return false;
    memcpy((unsigned char *)to + sizeof given, (const unsigned char *)from + sizeof given,
           (given < size ? given : size) - sizeof given);
    if (given > size)
        memset((unsigned char *)to + size, 0, given - size);
    return true;
}
