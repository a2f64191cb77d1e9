package bus_test

import (
	"fmt"
	"net"
	"net/url"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/kinference/kinference/internal/bus"
	"github.com/kinference/kinference/internal/testenv"
)

// A cluster without the room that is asked for says so in other words than one server.
func TestStreamFitsTheCluster(t *testing.T) {
	// All must know each other before there is a leader, so their ports are chosen first.
	var held []net.Listener
	var routes []*url.URL
	for range 3 {
		l := testenv.Listen(t)
		held, routes = append(held, l), append(routes, &url.URL{Scheme: "nats", Host: l.Addr().String()})
	}
	var servers []*server.Server
	for i, l := range held {
		l.Close()
		s, err := server.NewServer(&server.Options{
			ServerName: fmt.Sprint("n", i), Host: "127.0.0.1", Port: server.RANDOM_PORT, NoLog: true, NoSigs: true,
			JetStream: true, StoreDir: t.TempDir(), JetStreamMaxStore: 1 << 30,
			Cluster: server.ClusterOpts{Name: "c", Host: "127.0.0.1", Port: l.Addr().(*net.TCPAddr).Port}, Routes: routes,
		})
		if err != nil {
			t.Fatal(err)
		}
		go s.Start()
		t.Cleanup(func() {
			s.Shutdown()
			s.WaitForShutdown()
		})
		servers = append(servers, s)
	}
	for _, s := range servers {
		if !s.ReadyForConnections(30 * time.Second) {
			t.Fatal("NATS does not start")
		}
	}
	c := connect(t, servers[0].ClientURL())
	var err error
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); { // until there is a leader
		stream, e := c.EnsureUsageStream(t.Context(), bus.UsageSettings{Replicas: 3})
		if err = e; err == nil {
			if n := stream.CachedInfo().Config.MaxBytes; n < 16<<20 || n > 1<<30 {
				t.Errorf("stream of %d bytes", n)
			}
			return
		}
	}
	t.Fatal(err)
}
