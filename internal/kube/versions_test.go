package kube

import (
	"fmt"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/kinference/kinference/api/v1alpha1"
	"github.com/kinference/kinference/internal/resources"
)

// A compilation of 10,000 worker sets, of which none or one is bad. The second
// round for the bad one doubles the time.
func BenchmarkCompile(b *testing.B) {
	for _, bad := range []int{0, 1} {
		b.Run(fmt.Sprintf("bad=%d", bad), func(b *testing.B) {
			v := versions{}
			var list []Resource
			for i := range 10_000 {
				s := &v1alpha1.InferenceWorkerSet{}
				s.Namespace, s.Name, s.UID = fmt.Sprintf("ns-%d", i%100), fmt.Sprintf("set-%d", i), types.UID(fmt.Sprint(i))
				s.Generation, s.CreationTimestamp = 1, metav1.NewTime(time.Unix(int64(i), 0))
				s.Spec.Selector = &v1alpha1.LabelSelector{MatchLabels: map[string]v1alpha1.LabelValue{"app": v1alpha1.LabelValue(s.Name)}}
				s.Spec.Models = []v1alpha1.WorkerModel{{Name: v1alpha1.ModelName("m-" + s.Name)}}
				list = append(list, Resource{Object: s, Kind: KindOf("InferenceWorkerSet"), checked: resources.Check(s)})
			}
			options := resources.Options{Elsewhere: true, Partial: true, Pods: func(string, map[string]string) []resources.Pod { return nil }}
			v.compile(options, list)
			for i := range bad {
				s := list[i].Object.DeepCopyObject().(*v1alpha1.InferenceWorkerSet)
				s.Generation, s.Spec.Models[0].Aliases = 2, []v1alpha1.ModelName{s.Spec.Models[0].Name}
				list[i].Object, list[i].checked = s, resources.Check(s)
			}
			for b.Loop() {
				if c, problems := v.compile(options, list); len(c.Sets) != len(list) || (problems.Err() != nil) != (bad > 0) {
					b.Fatal(problems)
				}
			}
		})
	}
}
