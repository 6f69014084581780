/* An independent client of the service, on sd-bus. It shares no code with the service.
 *
 *   bus call N PATH INTERFACE METHOD [s WORD | as WORD...]   makes N calls, prints the nanoseconds of each on a line
 *   bus listen                                               prints each signal of the service as it comes
 *
 * A line of `listen` is: CLOCK_MONOTONIC in nanoseconds, the object's path, the signal's name, and `State=` or
 * `Healthy=` where PropertiesChanged has the property. The first line says that the client listens. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <systemd/sd-bus.h>
#include <time.h>

#define SERVICE "io.yunion.Mps1"

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static int failed(const char *what, int error) {
    fprintf(stderr, "%s: %s\n", what, strerror(-error));
    return EXIT_FAILURE;
}

static int append_arguments(sd_bus_message *message, char **words) {
    if (!words[0])
        return 0;
    if (!strcmp(words[0], "s"))
        return sd_bus_message_append(message, "s", words[1]);
    return sd_bus_message_append_strv(message, words + 1);
}

static int call_once(sd_bus *bus, char **words) {
    sd_bus_message *message = NULL, *answer = NULL;
    sd_bus_error error = SD_BUS_ERROR_NULL;
    int result = sd_bus_message_new_method_call(bus, &message, SERVICE, words[0], words[1], words[2]);
    if (result >= 0)
        result = append_arguments(message, words + 3);
    if (result < 0)
        return failed(words[2], result);
    int64_t start = now();
    result = sd_bus_call(bus, message, 60 * UINT64_C(1000000), &error, &answer);
    int64_t end = now();
    if (result < 0)
        fprintf(stderr, "%s: %s: %s\n", words[2], error.name, error.message);
    else
        printf("%" PRId64 "\n", end - start);
    sd_bus_error_free(&error);
    sd_bus_message_unref(message);
    sd_bus_message_unref(answer);
    return result < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}

static int print_properties(sd_bus_message *message) {
    const char *interface, *name, *text;
    int healthy, result;
    if ((result = sd_bus_message_read(message, "s", &interface)) < 0 ||
        (result = sd_bus_message_enter_container(message, 'a', "{sv}")) < 0)
        return result;
    while ((result = sd_bus_message_enter_container(message, 'e', "sv")) > 0) {
        if ((result = sd_bus_message_read(message, "s", &name)) < 0)
            return result;
        if (!strcmp(name, "State") && sd_bus_message_read(message, "v", "s", &text) > 0)
            printf(" State=%s", text);
        else if (!strcmp(name, "Healthy") && sd_bus_message_read(message, "v", "b", &healthy) > 0)
            printf(" Healthy=%d", healthy);
        else
            sd_bus_message_skip(message, "v");
        sd_bus_message_exit_container(message);
    }
    return result;
}

static int on_signal(sd_bus_message *message, void *unused, sd_bus_error *error) {
    (void)unused, (void)error;
    const char *member = sd_bus_message_get_member(message);
    printf("%" PRId64 " %s %s", now(), sd_bus_message_get_path(message), member);
    if (!strcmp(member, "PropertiesChanged"))
        print_properties(message);
    putchar('\n');
    fflush(stdout);
    return 0;
}

static int listen_for_ever(sd_bus *bus) {
    int result = sd_bus_add_match(bus, NULL, "type='signal',sender='" SERVICE "'", on_signal, NULL);
    if (result < 0)
        return failed("match", result);
    puts("listening");
    fflush(stdout);
    for (;;) {
        result = sd_bus_process(bus, NULL);
        if (result == 0)
            result = sd_bus_wait(bus, UINT64_MAX);
        if (result < 0)
            return failed("bus", result);
    }
}

int main(int count, char **words) {
    sd_bus *bus;
    int result = sd_bus_open_system(&bus);
    if (result < 0)
        return failed("no system bus", result);
    if (count == 2 && !strcmp(words[1], "listen"))
        return listen_for_ever(bus);
    if (count < 6 || strcmp(words[1], "call"))
        return failed("usage: bus call N PATH INTERFACE METHOD [ARGUMENT...] | bus listen", -22);
    for (long left = atol(words[2]); left > 0 && result >= 0; left--)
        if (call_once(bus, words + 3) != EXIT_SUCCESS)
            return EXIT_FAILURE;
    sd_bus_unref(bus);
    return EXIT_SUCCESS;
}
