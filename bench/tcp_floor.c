/*
 * What counting TCP sockets costs at the least, and the sockets to count. For bench_tcp.py.
 *
 *   tcp_floor make NUMBER PORT   leaves NUMBER sockets in TIME_WAIT, v4 and v6 by turns; every hundredth has a source port from PORT on
 *   tcp_floor count FIRST LAST   for each line on stdin does once what the collectors tcp and rendezvous do, and prints the milliseconds of
 *                                CPU that it took, sockets in TIME_WAIT, and those among them with a source port from FIRST to LAST
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { TIME_WAIT = 6, EVERY_STATE = 0xf7e, FEW = 1000 };

struct counts {
    unsigned states[16];
    unsigned ports_used, ports_in_time_wait;
};

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static double cpu(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

static int serve(int family, int port, struct sockaddr_in6 *address, socklen_t *length)
{
    int listener = socket(family, SOCK_STREAM, 0), one = 1;
    memset(address, 0, sizeof *address);
    if (family == AF_INET) {
        struct sockaddr_in *v4 = (void *)address;
        v4->sin_family = AF_INET;
        v4->sin_port = htons(port);
        v4->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        *length = sizeof *v4;
    } else {
        address->sin6_family = AF_INET6;
        address->sin6_port = htons(port);
        address->sin6_addr = in6addr_loopback;
        *length = sizeof *address;
    }
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (void *)address, *length) || listen(listener, 16))
        fail("listener");
    return listener;
}

static void make(int number, int port)
{
    for (int made = 0, round = 0; made < number; round++) {
        int family = round & 1 ? AF_INET6 : AF_INET;
        struct sockaddr_in6 near, far;
        socklen_t near_length, far_length;
        int ours = serve(family, port + round % 100, &near, &near_length);
        int theirs = serve(family, 20000 + (int)(getpid() % 4000) + round % 1000, &far, &far_length);
        for (int i = 0; i < 100 && made < number; i++, made++) {
            int in_range = i == 0;
            int client = socket(family, SOCK_STREAM, 0);
            if (connect(client, in_range ? (void *)&near : (void *)&far, in_range ? near_length : far_length))
                fail("connect");
            int accepted = accept(in_range ? ours : theirs, NULL, NULL);
            if (accepted < 0)
                fail("accept");
            close(in_range ? accepted : client); /* who closes first is the one in TIME_WAIT */
            close(in_range ? client : accepted);
        }
        close(ours);
        close(theirs);
    }
}

static unsigned time_wait(void)
{
    char text[4096];
    unsigned found = 0;
    for (int family = 0; family < 2; family++) {
        int file = open(family ? "/proc/net/sockstat6" : "/proc/net/sockstat", O_RDONLY | O_CLOEXEC);
        ssize_t length = read(file, text, sizeof text - 1);
        close(file);
        if (length <= 0)
            continue;
        text[length] = 0;
        char *at = strstr(text, " tw ");
        if (at != NULL)
            found = strtoul(at + 4, NULL, 10);
    }
    return found;
}

static void walk(unsigned states, int first, int last, int filtered, struct counts *counts)
{
    static char buffer[1 << 16];
    struct {
        struct nlmsghdr header;
        struct inet_diag_req body;
        struct rtattr attribute;
        struct inet_diag_bc_op code[4];
    } request;
    struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};
    memset(&request, 0, sizeof request);
    request.header.nlmsg_type = TCPDIAG_GETSOCK;
    request.header.nlmsg_flags = NLM_F_REQUEST | NLM_F_DUMP;
    request.header.nlmsg_len = filtered ? sizeof request : offsetof(__typeof__(request), attribute);
    request.body.idiag_states = states;
    request.attribute.rta_type = INET_DIAG_REQ_BYTECODE;
    request.attribute.rta_len = sizeof request.attribute + sizeof request.code;
    request.code[0] = (struct inet_diag_bc_op){INET_DIAG_BC_S_GE, 8, 20};
    request.code[1].no = first;
    request.code[2] = (struct inet_diag_bc_op){INET_DIAG_BC_S_LE, 8, 12};
    request.code[3].no = last;
    int diag = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG);
    if (diag < 0 || sendto(diag, &request, request.header.nlmsg_len, 0, (void *)&kernel, sizeof kernel) < 0)
        fail("netlink");
    for (;;) {
        ssize_t length = recv(diag, buffer, sizeof buffer, 0);
        if (length <= 0)
            fail("recv");
        for (struct nlmsghdr *header = (void *)buffer; NLMSG_OK(header, length); header = NLMSG_NEXT(header, length)) {
            if (header->nlmsg_type == NLMSG_DONE) {
                close(diag);
                return;
            }
            if (header->nlmsg_type == NLMSG_ERROR) {
                errno = -((struct nlmsgerr *)NLMSG_DATA(header))->error;
                fail("dump");
            }
            struct inet_diag_msg *message = NLMSG_DATA(header);
            int port = ntohs(message->id.idiag_sport);
            counts->states[message->idiag_state & 15]++;
            if (port >= first && port <= last) {
                counts->ports_used++;
                counts->ports_in_time_wait += message->idiag_state == TIME_WAIT;
            }
        }
    }
}

static void count(int first, int last)
{
    char line[16];
    while (fgets(line, sizeof line, stdin) != NULL) {
        struct counts counts = {0};
        double before = cpu();
        unsigned total = time_wait();
        if (total <= FEW) {
            walk(EVERY_STATE, first, last, 0, &counts);
        } else {
            walk(EVERY_STATE & ~(1 << TIME_WAIT), first, last, 0, &counts);
            walk(1 << TIME_WAIT, first, last, 1, &counts);
        }
        printf("%.4f %u %u\n", cpu() - before, total, counts.ports_in_time_wait);
        fflush(stdout);
    }
}

int main(int number, char **arguments)
{
    if (number == 4 && strcmp(arguments[1], "make") == 0)
        make(atoi(arguments[2]), atoi(arguments[3]));
    else if (number == 4 && strcmp(arguments[1], "count") == 0)
        count(atoi(arguments[2]), atoi(arguments[3]));
    else {
        fprintf(stderr, "usage: tcp_floor make NUMBER PORT | tcp_floor count FIRST LAST\n");
        return 2;
    }
    return 0;
}
