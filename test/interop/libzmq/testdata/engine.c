/*
 * The event side of a vLLM engine on libzmq's own sockets, driven by lines on
 * stdin: an independent peer for the relay. It does what vLLM's publisher does:
 * one thread, a PUB that binds, a ROUTER that answers replays from a buffer.
 *
 *   engine EVENTS REPLAY FRAMING     endpoints; framing "old" or "new"
 *
 *   p HEX   publish a batch          l HEX   keep it for replay only
 *   b       the next numbers start at 0 with an empty buffer
 *   q       exit
 *
 * Each line is answered by "ok".
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zmq.h>

#define MAX_BATCHES 65536

static struct {
	unsigned char *data;
	size_t size;
} kept[MAX_BATCHES];
static uint64_t next_seq;
static void *pub, *router;
static int new_framing;

static void die(const char *what) {
	fprintf(stderr, "%s: %s\n", what, zmq_strerror(zmq_errno()));
	exit(1);
}

static void put_seq(unsigned char out[8], uint64_t seq) {
	for (int i = 0; i < 8; i++) out[i] = (unsigned char)(seq >> (8 * (7 - i)));
}

static void send_frame(void *socket, const void *data, size_t size, int more) {
	if (zmq_send(socket, data, size, more ? ZMQ_SNDMORE : 0) < 0) die("zmq_send");
}

static void reply(const unsigned char *id, size_t id_size, uint64_t seq, const void *data, size_t size, const char *topic) {
	unsigned char number[8];
	put_seq(number, seq);
	send_frame(router, id, id_size, 1);
	send_frame(router, "", 0, 1);
	if (new_framing) send_frame(router, topic, strlen(topic), 1);
	send_frame(router, number, 8, 1);
	send_frame(router, data, size, 0);
}

static void serve_replay(void) {
	unsigned char id[256], empty[8], number[16], more_data[8];
	int id_size = zmq_recv(router, id, sizeof id, 0);
	int empty_size = zmq_recv(router, empty, sizeof empty, 0);
	int number_size = zmq_recv(router, number, sizeof number, 0);
	int more = 0;
	size_t more_size = sizeof more;
	zmq_getsockopt(router, ZMQ_RCVMORE, &more, &more_size);
	while (more) {
		zmq_recv(router, more_data, sizeof more_data, 0);
		zmq_getsockopt(router, ZMQ_RCVMORE, &more, &more_size);
	}
	if (id_size < 0 || empty_size != 0 || number_size != 8) return; /* vLLM ignores it, too */
	uint64_t start = 0;
	for (int i = 0; i < 8; i++) start = start << 8 | number[i];
	for (uint64_t seq = start; seq < next_seq; seq++) reply(id, (size_t)id_size, seq, kept[seq].data, kept[seq].size, "kv");
	reply(id, (size_t)id_size, UINT64_MAX, "", 0, "");
}

static void publish(const char *hex, int send) {
	size_t size = strlen(hex) / 2;
	unsigned char *data = malloc(size + 1), number[8];
	if (data == NULL || next_seq >= MAX_BATCHES) exit(1);
	for (size_t i = 0; i < size; i++) {
		unsigned byte;
		if (sscanf(hex + 2 * i, "%2x", &byte) != 1) exit(1);
		data[i] = (unsigned char)byte;
	}
	kept[next_seq].data = data;
	kept[next_seq].size = size;
	put_seq(number, next_seq++);
	if (!send) return;
	send_frame(pub, "kv", 2, 1);
	send_frame(pub, number, 8, 1);
	send_frame(pub, data, size, 0);
}

static void command(char *line) {
	switch (line[0]) {
	case 'p':
	case 'l':
		publish(line + 2, line[0] == 'p');
		break;
	case 'b':
		while (next_seq > 0) free(kept[--next_seq].data);
		break;
	case 'q':
		exit(0);
	}
	puts("ok");
	fflush(stdout);
}

/* Lines are cut out of what read brings: stdio's buffer would hide from poll
 * what it has read ahead. */
static void read_commands(void) {
	static char *line;
	static size_t used, room;
	if (room - used < 65536) {
		room = used + 131072;
		line = realloc(line, room);
		if (line == NULL) exit(1);
	}
	ssize_t n = read(0, line + used, room - used - 1);
	if (n <= 0) exit(0);
	used += (size_t)n;
	char *end;
	while ((end = memchr(line, '\n', used)) != NULL) {
		*end = 0;
		command(line);
		size_t eaten = (size_t)(end + 1 - line);
		memmove(line, end + 1, used - eaten);
		used -= eaten;
	}
}

int main(int argc, char **argv) {
	if (argc != 4) return 2;
	void *context = zmq_ctx_new();
	int linger = 0;
	pub = zmq_socket(context, ZMQ_PUB);
	router = zmq_socket(context, ZMQ_ROUTER);
	zmq_setsockopt(pub, ZMQ_LINGER, &linger, sizeof linger);
	zmq_setsockopt(router, ZMQ_LINGER, &linger, sizeof linger);
	new_framing = strcmp(argv[3], "new") == 0;
	if (zmq_bind(pub, argv[1]) != 0) die("bind events");
	if (zmq_bind(router, argv[2]) != 0) die("bind replay");
	puts("ready");
	fflush(stdout);
	for (;;) {
		zmq_pollitem_t items[] = {{NULL, 0, ZMQ_POLLIN, 0}, {router, 0, ZMQ_POLLIN, 0}};
		if (zmq_poll(items, 2, -1) < 0) die("zmq_poll");
		if (items[1].revents) serve_replay();
		if (items[0].revents) read_commands();
	}
}
