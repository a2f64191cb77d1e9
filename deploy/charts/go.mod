module github.com/kinference/kinference/deploy/charts

go 1.26.0
